#define _GNU_SOURCE
#include "call.h"

#include <string.h>

#include "fault.h"

nvmlReturn_t copy_text(char *buffer, unsigned int length, const char *text)
{
    if (buffer == NULL)
        return NVML_ERROR_INVALID_ARGUMENT;
    if (strlen(text) + 1 > length)
        return NVML_ERROR_INSUFFICIENT_SIZE;
    strcpy(buffer, text);
    return NVML_SUCCESS;
}

/* All that match are met in the order of planting, up to one that ends the call. */
nvmlReturn_t call_meet_faults(struct call *call, const char *function)
{
    struct state *state = call->node->state;
    int slot = call->gpu == NULL ? -1 : (int)(call->gpu - state->gpu);
    const struct fault *fault;
    int from = 0;

    while ((fault = fault_take(state, function, slot, &from)) != NULL) {
        switch (fault->kind) {
        case FAULT_CODE:
            return (nvmlReturn_t)fault->code;
        case FAULT_SILENT:
            call->silent = true;
            break;
        case FAULT_APPLIED:
            call->after_code = (nvmlReturn_t)fault->code;
            call->late = fault->delay_us > 0 ? fault : NULL;
            break;
        case FAULT_DELAY:
            fault_delay(call->node, call->gpu, fault->delay_us);
            break;
        case FAULT_HANG:
            fault_hang(call->node, call->gpu, fault);
            break;
        case FAULT_CRASH:
            fault_crash(call->node);
        default:
            if (call->n_met < MAX_MET)
                call->met[call->n_met++] = *fault;
            break;
        }
    }
    return NVML_SUCCESS;
}

double call_value(const struct call *call, unsigned int field, double value)
{
    for (unsigned i = 0; i < call->n_met; i++)
        if (call->met[i].kind == FAULT_VALUE && (call->met[i].field == 0 || call->met[i].field == (int32_t)field))
            value = call->met[i].value;
    return value;
}

unsigned long long whole(double value)
{
    return value >= 0 && value < 18446744073709551616.0 ? (unsigned long long)value : ~0ULL;
}

nvmlReturn_t call_entry_code(const struct call *call, unsigned int field, nvmlReturn_t code)
{
    for (unsigned i = 0; i < call->n_met; i++)
        if (call->met[i].kind == FAULT_ENTRY && (call->met[i].field == 0 || call->met[i].field == (int32_t)field))
            code = (nvmlReturn_t)call->met[i].code;
    return code;
}

static nvmlReturn_t begin(struct call *call, const char *function)
{
    nvmlReturn_t code;

    node_lock(call->node);
    if (call->gpu != NULL)
        fault_wait_wedged(call->node, call->gpu);
    code = call_meet_faults(call, function);
    if (code == NVML_SUCCESS && call->gpu != NULL && call->gpu->hidden)
        code = NVML_ERROR_GPU_IS_LOST;
    if (code == NVML_SUCCESS && call->gpu != NULL && call->gpu->sticky_code != 0)
        code = (nvmlReturn_t)call->gpu->sticky_code;
    if (code != NVML_SUCCESS) {
        node_unlock(call->node);
        return code;
    }
    call->now_ns = node_now_ns(call->node);
    node_sweep_sometimes(call->node, call->now_ns);
    if (call->gpu != NULL)
        gpu_advance(call->node, call->gpu, call->now_ns);
    return NVML_SUCCESS;
}

nvmlReturn_t call_begin_any(struct call *call, const char *function, nvmlDevice_t device)
{
    nvmlReturn_t code;

    *call = (struct call){.node = current_node(), .slice = BOARD};
    if (call->node == NULL)
        return NVML_ERROR_UNINITIALIZED;
    code = handle_find(call->node, device, &call->gpu, &call->slice);
    return code != NVML_SUCCESS ? code : begin(call, function);
}

nvmlReturn_t call_begin(struct call *call, const char *function, nvmlDevice_t device)
{
    nvmlReturn_t code = call_begin_any(call, function, device);

    return code == NVML_SUCCESS && call->slice != BOARD ? call_end(call, NVML_ERROR_NOT_SUPPORTED) : code;
}

nvmlReturn_t call_begin_system(struct call *call, const char *function)
{
    *call = (struct call){.node = current_node(), .slice = BOARD};
    return call->node == NULL ? NVML_ERROR_UNINITIALIZED : begin(call, function);
}

nvmlReturn_t call_end(struct call *call, nvmlReturn_t code)
{
    if (call->late != NULL && call->late->delay_us > 0)
        fault_hang(call->node, call->gpu, call->late);
    node_unlock(call->node);
    return code == NVML_SUCCESS ? call->after_code : code;
}
