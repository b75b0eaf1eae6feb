/* NVML's event sets: Xid errors, kept in a ring of the node that every set reads on its own.
 *
 * An event that no set has read when MAX_EVENTS newer ones came is lost. */
#define _GNU_SOURCE
#include <stdlib.h>
#include <time.h>

#include "call.h"

#define SUPPORTED (nvmlEventTypeXidCriticalError | nvmlEventMigConfigChange)
#define POLL_NS INT64_C(2000000)

struct nvmlEventSet_st {
    uint64_t next;
    uint64_t types[MAX_GPUS];
};

void event_post(struct state *state, int gpu, uint64_t type, uint64_t data)
{
    state->event[state->n_events % MAX_EVENTS] = (struct event){gpu, type, data};
    state->n_events++;
}

GETTER(nvmlDeviceGetSupportedEventTypes, unsigned long long, SUPPORTED)

nvmlReturn_t nvmlEventSetCreate(nvmlEventSet_t *set)
{
    struct call call;
    nvmlReturn_t code = set == NULL ? NVML_ERROR_INVALID_ARGUMENT : call_begin_system(&call, __func__);

    if (code != NVML_SUCCESS)
        return code;
    *set = calloc(1, sizeof **set);
    if (*set == NULL)
        return call_end(&call, NVML_ERROR_MEMORY);
    (*set)->next = call.node->state->n_events;
    return call_end(&call, NVML_SUCCESS);
}

nvmlReturn_t nvmlDeviceRegisterEvents(nvmlDevice_t device, unsigned long long types, nvmlEventSet_t set)
{
    struct call call;
    nvmlReturn_t code = set == NULL ? NVML_ERROR_INVALID_ARGUMENT : call_begin(&call, __func__, device);

    if (code != NVML_SUCCESS)
        return code;
    if ((types & ~(unsigned long long)SUPPORTED) != 0)
        return call_end(&call, NVML_ERROR_NOT_SUPPORTED);
    set->types[call.gpu - call.node->state->gpu] |= types;
    return call_end(&call, NVML_SUCCESS);
}

static bool next_event(struct node *node, nvmlEventSet_t set, nvmlEventData_t *data)
{
    const struct state *state = node->state;

    if (state->n_events > set->next + MAX_EVENTS)
        set->next = state->n_events - MAX_EVENTS;
    while (set->next < state->n_events) {
        const struct event *event = &state->event[set->next++ % MAX_EVENTS];
        if ((set->types[event->gpu] & event->type) == 0)
            continue;
        *data = (nvmlEventData_t){
            .device = handle_of(node, &state->gpu[event->gpu], BOARD),
            .eventType = event->type,
            .eventData = event->data,
            .gpuInstanceId = 0xFFFFFFFF,
            .computeInstanceId = 0xFFFFFFFF,
        };
        return true;
    }
    return false;
}

nvmlReturn_t nvmlEventSetWait_v2(nvmlEventSet_t set, nvmlEventData_t *data, unsigned int timeout_ms)
{
    const struct timespec poll = {0, POLL_NS};
    int64_t until_ns = monotonic_ns() + timeout_ms * INT64_C(1000000);
    struct call call;
    nvmlReturn_t code = set == NULL || data == NULL ? NVML_ERROR_INVALID_ARGUMENT : call_begin_system(&call, __func__);

    if (code != NVML_SUCCESS)
        return code;
    while (!next_event(call.node, set, data)) {
        if (monotonic_ns() >= until_ns)
            return call_end(&call, NVML_ERROR_TIMEOUT);
        node_unlock(call.node);
        nanosleep(&poll, NULL);
        node_lock(call.node);
    }
    return call_end(&call, NVML_SUCCESS);
}

nvmlReturn_t nvmlEventSetFree(nvmlEventSet_t set)
{
    if (set == NULL)
        return NVML_ERROR_INVALID_ARGUMENT;
    free(set);
    return NVML_SUCCESS;
}
