#define _GNU_SOURCE
#include "gpu.h"

#include <errno.h>
#include <math.h>
#include <stdio.h>
#include <string.h>

static const struct segment *segment_at(const struct gpu *gpu, int64_t at_ns)
{
    uint64_t newest = gpu->n_segments;
    uint64_t oldest = newest > MAX_SEGMENTS ? newest - MAX_SEGMENTS : 0;

    for (uint64_t i = newest - 1; i > oldest; i--)
        if (gpu->segment[i % MAX_SEGMENTS].start_ns <= at_ns)
            return &gpu->segment[i % MAX_SEGMENTS];
    return &gpu->segment[oldest % MAX_SEGMENTS];
}

struct reading gpu_read(const struct gpu *gpu, int64_t at_ns)
{
    const struct segment *segment = segment_at(gpu, at_ns);
    double passed_s = at_ns <= segment->start_ns ? 0 : (double)(at_ns - segment->start_ns) / (double)NS_PER_S;
    double excess_w = segment->draw_w - segment->target_w;
    double left = segment->tau_s > 0 ? exp(-passed_s / segment->tau_s) : 0;
    struct reading reading = {
        .draw_w = segment->target_w + excess_w * left,
        .energy_j = segment->energy_j + segment->target_w * passed_s + excess_w * segment->tau_s * (1 - left),
        .clock = segment->clock,
        .power_capped = segment->power_capped,
        .busy = segment->rate[SM_ACTIVE] > 0,
    };

    for (int i = 0; i < N_COUNTERS; i++) {
        reading.counter[i] = segment->counter[i] + segment->rate[i] * passed_s;
        reading.rate[i] = segment->rate[i];
    }
    return reading;
}

double gpu_mean_w(const struct gpu *gpu, int64_t from_ns, int64_t to_ns)
{
    uint64_t oldest = gpu->n_segments > MAX_SEGMENTS ? gpu->n_segments - MAX_SEGMENTS : 0;
    int64_t known_ns = gpu->segment[oldest % MAX_SEGMENTS].start_ns;

    from_ns = from_ns > known_ns ? from_ns : known_ns;
    if (from_ns >= to_ns)
        return gpu_read(gpu, to_ns).draw_w;
    return (gpu_read(gpu, to_ns).energy_j - gpu_read(gpu, from_ns).energy_j) /
           ((double)(to_ns - from_ns) / (double)NS_PER_S);
}

const struct demand *gpu_owner(const struct gpu *gpu)
{
    const struct demand *owner = NULL;

    for (int i = 0; i < MAX_DEMANDS; i++) {
        const struct demand *demand = &gpu->demand[i];
        if (demand->process.pid != 0 && (owner == NULL || demand->serial > owner->serial))
            owner = demand;
    }
    return owner;
}

unsigned gpu_demands(const struct gpu *gpu)
{
    unsigned count = 0;

    for (int i = 0; i < MAX_DEMANDS; i++)
        count += gpu->demand[i].process.pid != 0;
    return count;
}

/* The activities have the right shape over the clock (tensor activity times clock follows throughput, memory traffic
 * follows throughput); their levels at full clock are assumptions, not fitted. */
static void set_rates(struct segment *segment, const struct gpu *gpu, const struct workload *workload)
{
    double time = step_time(workload, segment->clock);
    double reference = step_time(workload, clock_for_cap(workload, gpu->reference_mw / 1000.0, CLOCK_MIN, 1.0));

    /* Processes that share a GPU share its time. */
    segment->rate[WORK] = reference / time / gpu_demands(gpu);
    segment->rate[SM_ACTIVE] = 0.97;
    segment->rate[TENSOR_ACTIVE] = 0.80 * workload->compute_share / segment->clock / time;
    segment->rate[DRAM_ACTIVE] = fmin(1.0, workload->memory_w / 150.0 / time);
    segment->rate[COPY_ACTIVE] = fmin(1.0, (1.0 - 0.6 * workload->compute_share) / time);
}

void gpu_settle(struct gpu *gpu, int64_t now_ns)
{
    struct segment next = {.start_ns = now_ns, .tau_s = gpu->tau_ms / 1000.0, .target_w = gpu->idle_w};
    const struct demand *owner = gpu_owner(gpu);

    next.draw_w = gpu->idle_w;
    if (gpu->n_segments > 0) {
        struct reading before = gpu_read(gpu, now_ns);
        next.draw_w = before.draw_w;
        next.energy_j = before.energy_j;
        memcpy(next.counter, before.counter, sizeof next.counter);
    }
    next.clock = CLOCK_MIN;
    if (owner != NULL) {
        next.clock = clock_for_cap(&owner->workload, gpu->effective_mw / 1000.0,
                                   fmin(gpu->clock_floor, gpu->clock_limit), gpu->clock_limit);
        next.target_w = power_w(&owner->workload, next.clock);
        next.power_capped = next.clock < gpu->clock_limit;
        set_rates(&next, gpu, &owner->workload);
    }
    gpu->segment[gpu->n_segments % MAX_SEGMENTS] = next;
    gpu->n_segments++; /* publishes the segment: a process killed above changed nothing */
}

void gpu_start(struct node *node, struct gpu *gpu, int64_t now_ns)
{
    gpu->requested_mw = gpu->in_force_mw = gpu->effective_mw = gpu->default_mw;
    gpu_settle(gpu, now_ns);
    trace_limit(node, gpu, now_ns, process_self().pid);
}

static void put_in_force(struct node *node, struct gpu *gpu, uint32_t requested_mw, int32_t pid, int64_t at_ns)
{
    uint32_t effective_mw = requested_mw;

    if (gpu->bmc_mw != 0 && gpu->bmc_mw < effective_mw)
        effective_mw = gpu->bmc_mw;
    if (gpu->module_mw != 0) {
        uint32_t left_mw = gpu->module_mw > gpu->module_rest_mw ? gpu->module_mw - gpu->module_rest_mw : 0;
        effective_mw = left_mw < effective_mw ? left_mw : effective_mw;
    }
    if (effective_mw == gpu->effective_mw && requested_mw == gpu->in_force_mw)
        return;
    gpu->in_force_mw = requested_mw;
    gpu->effective_mw = effective_mw;
    gpu_settle(gpu, at_ns);
    trace_limit(node, gpu, at_ns, pid);
}

void gpu_advance(struct node *node, struct gpu *gpu, int64_t now_ns)
{
    while (gpu->n_pending > 0 && gpu->pending[0].due_ns <= now_ns) {
        struct pending_limit first = gpu->pending[0];
        put_in_force(node, gpu, first.requested_mw, first.pid, first.due_ns);
        memmove(&gpu->pending[0], &gpu->pending[1], (MAX_PENDING - 1) * sizeof gpu->pending[0]);
        gpu->n_pending--;
    }
}

void gpu_request_limit(struct node *node, struct gpu *gpu, uint32_t limit_mw, int32_t pid, int64_t now_ns)
{
    int64_t due_ns = now_ns + (int64_t)gpu->effect_us * 1000;

    gpu_advance(node, gpu, now_ns);
    if (gpu->granularity_mw > 1)
        limit_mw -= limit_mw % gpu->granularity_mw;
    if (gpu->n_pending > 0 && gpu->pending[gpu->n_pending - 1].due_ns > due_ns)
        due_ns = gpu->pending[gpu->n_pending - 1].due_ns; /* limits come into force in the order of the sets */
    if (gpu->n_pending == MAX_PENDING)
        gpu->n_pending--; /* a burst of sets: the newest takes the place of the one before */
    gpu->pending[gpu->n_pending] = (struct pending_limit){due_ns, limit_mw, pid};
    gpu->requested_mw = limit_mw;
    gpu->n_pending++;
    gpu_advance(node, gpu, now_ns);
}

void gpu_limits_changed(struct node *node, struct gpu *gpu, int32_t pid, int64_t now_ns)
{
    put_in_force(node, gpu, gpu->in_force_mw, pid, now_ns);
}

void gpu_lose_limit(struct node *node, struct gpu *gpu, int64_t now_ns)
{
    gpu_advance(node, gpu, now_ns);
    gpu->n_pending = 0;
    gpu->requested_mw = gpu->default_mw;
    put_in_force(node, gpu, gpu->default_mw, 0, now_ns);
}

int gpu_add_demand(struct node *node, struct gpu *gpu, const struct workload *workload, const char *job,
                   int64_t now_ns)
{
    struct process self = process_self();
    struct demand *slot = NULL;

    gpu_advance(node, gpu, now_ns);
    for (int i = 0; i < MAX_DEMANDS; i++) {
        struct demand *demand = &gpu->demand[i];
        if (demand->process.pid == self.pid) {
            slot = demand;
            break;
        }
        if (demand->process.pid == 0 && slot == NULL)
            slot = demand;
    }
    if (slot == NULL)
        return -ENOSPC;
    slot->process.pid = 0; /* not a demand until it is complete */
    slot->workload = *workload;
    slot->serial = ++node->state->serial;
    snprintf(slot->job, sizeof slot->job, "%s", job);
    slot->process = self;
    gpu_settle(gpu, now_ns);
    return 0;
}

bool gpu_remove_demand(struct gpu *gpu, struct process process, int64_t now_ns)
{
    for (int i = 0; i < MAX_DEMANDS; i++) {
        struct demand *demand = &gpu->demand[i];
        if (demand->process.pid == process.pid && demand->process.start_ticks == process.start_ticks) {
            demand->process = (struct process){0};
            gpu_settle(gpu, now_ns);
            return true;
        }
    }
    return false;
}

void node_sweep(struct node *node, int64_t now_ns)
{
    struct state *state = node->state;
    bool held = false;

    for (int i = 0; i < MAX_CLIENTS; i++) {
        struct client *client = &state->client[i];
        if (client->process.pid != 0 && !process_alive(client->process))
            *client = (struct client){0};
        held |= client->process.pid != 0;
    }
    for (uint32_t g = 0; g < state->n_gpus; g++) {
        struct gpu *gpu = &state->gpu[g];
        gpu_advance(node, gpu, now_ns);
        for (int i = 0; i < MAX_DEMANDS; i++) {
            struct process process = gpu->demand[i].process;
            if (process.pid != 0 && !process_alive(process))
                gpu_remove_demand(gpu, process, now_ns);
        }
        if (!held && !gpu->persistence && gpu_demands(gpu) == 0)
            gpu_lose_limit(node, gpu, now_ns);
    }
    state->swept_ns = now_ns;
}

void node_sweep_sometimes(struct node *node, int64_t now_ns)
{
    if (now_ns - node->state->swept_ns >= NS_PER_S / 20)
        node_sweep(node, now_ns);
}
