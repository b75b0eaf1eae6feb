#define _GNU_SOURCE
#include "fault.h"

#include <stdlib.h>
#include <string.h>
#include <time.h>

#define POLL_NS INT64_C(2000000)

const struct fault *fault_take(struct state *state, const char *function, int gpu, int *from)
{
    while (*from < MAX_FAULTS) {
        struct fault *fault = &state->fault[(*from)++];

        if (fault->function[0] == '\0' || fault->count == 0 || (fault->gpu != -1 && fault->gpu != gpu))
            continue;
        if (strcmp(fault->function, function) != 0 && strcmp(fault->function, "*") != 0)
            continue;
        if (fault->after > 0) {
            fault->after--;
            continue;
        }
        if (fault->count > 0)
            fault->count--;
        state->faults_fired++;
        return fault;
    }
    return NULL;
}

static void sleep_unlocked(struct node *node, int64_t ns)
{
    struct timespec left = {ns / NS_PER_S, ns % NS_PER_S};

    node_unlock(node);
    while (nanosleep(&left, &left) != 0)
        continue;
    node_lock(node);
}

/* Who sleeps in a call is known only where it matters; the entry of a process that is killed here stays behind. */
static struct process *enter(struct gpu *gpu)
{
    for (int i = 0; gpu != NULL && gpu->orphan_hang_ms != 0 && i < MAX_INSIDE; i++) {
        if (gpu->inside[i].pid == 0) {
            gpu->inside[i] = process_self();
            return &gpu->inside[i];
        }
    }
    return NULL;
}

static void leave(struct process *entry)
{
    if (entry != NULL)
        *entry = (struct process){0};
}

void fault_delay(struct node *node, struct gpu *gpu, int64_t delay_us)
{
    struct process *entry = enter(gpu);

    sleep_unlocked(node, delay_us * 1000);
    leave(entry);
}

void fault_hang(struct node *node, struct gpu *gpu, const struct fault *fault)
{
    int64_t until_ns = fault->delay_us == 0 ? INT64_MAX : monotonic_ns() + fault->delay_us * 1000;
    uint64_t serial = fault->serial;
    struct process *entry = enter(gpu);

    while (fault->serial == serial && monotonic_ns() < until_ns)
        sleep_unlocked(node, POLL_NS);
    leave(entry);
}

static void find_orphans(struct gpu *gpu)
{
    for (int i = 0; i < MAX_INSIDE; i++) {
        if (gpu->inside[i].pid == 0 || process_alive(gpu->inside[i]))
            continue;
        gpu->inside[i] = (struct process){0};
        gpu->wedged_until_ns = monotonic_ns() + gpu->orphan_hang_ms * INT64_C(1000000);
    }
}

void fault_wait_wedged(struct node *node, struct gpu *gpu)
{
    struct process *entry = NULL;

    if (gpu->orphan_hang_ms != 0)
        find_orphans(gpu);
    if (monotonic_ns() >= gpu->wedged_until_ns)
        return;
    entry = enter(gpu);
    while (monotonic_ns() < gpu->wedged_until_ns)
        sleep_unlocked(node, POLL_NS);
    leave(entry);
}

void fault_crash(struct node *node)
{
    static volatile int *volatile nowhere;

    node_unlock(node);
    *nowhere = 1;
    abort();
}
