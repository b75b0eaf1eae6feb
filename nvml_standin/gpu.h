/* Everything that changes a simulated GPU. All functions want the node's lock held; `now_ns` never runs backwards. */
#ifndef PFI_GPU_H
#define PFI_GPU_H

#include "state.h"

/* A reading of one GPU at one instant. */
struct reading {
    double draw_w;
    double energy_j;
    double clock;
    bool power_capped;
    bool busy;
    double counter[N_COUNTERS];
    double rate[N_COUNTERS];
};

void gpu_start(struct node *node, struct gpu *gpu, int64_t now_ns);

/* Bring into force every limit that is due, each at its own instant. */
void gpu_advance(struct node *node, struct gpu *gpu, int64_t now_ns);

struct reading gpu_read(const struct gpu *gpu, int64_t at_ns);
double gpu_mean_w(const struct gpu *gpu, int64_t from_ns, int64_t to_ns);

void gpu_request_limit(struct node *node, struct gpu *gpu, uint32_t limit_mw, int32_t pid, int64_t now_ns);

/* After bmc_mw, module_mw or module_rest_mw changed. */
void gpu_limits_changed(struct node *node, struct gpu *gpu, int32_t pid, int64_t now_ns);

/* The GPU was initialised anew: back to the default limit at once. `pid` 0 in the trace means the driver itself. */
void gpu_lose_limit(struct node *node, struct gpu *gpu, int64_t now_ns);

/* Draw and clock follow demand, limit and slowdown: called after any of them changed. */
void gpu_settle(struct gpu *gpu, int64_t now_ns);

/* 0 or a negative errno. */
int gpu_add_demand(struct node *node, struct gpu *gpu, const struct workload *workload, const char *job,
                   int64_t now_ns);
bool gpu_remove_demand(struct gpu *gpu, struct process process, int64_t now_ns);
const struct demand *gpu_owner(const struct gpu *gpu);
unsigned gpu_demands(const struct gpu *gpu);

/* Forget dead clients and dead jobs; a GPU that nobody holds, with persistence off, loses its limit. */
void node_sweep(struct node *node, int64_t now_ns);
void node_sweep_sometimes(struct node *node, int64_t now_ns);

/* sensor.c: what the board's sensors say, which need not be so. */
double sensor_average_mw(const struct gpu *gpu, int64_t now_ns);
double sensor_instant_mw(const struct gpu *gpu, int64_t now_ns);
double sensor_energy_mj(const struct gpu *gpu, int64_t now_ns);

/* nvml_event.c: the lock held. */
void event_post(struct state *state, int gpu, uint64_t type, uint64_t data);

/* trace.c */
void trace_limit(const struct node *node, const struct gpu *gpu, int64_t at_ns, int32_t pid);
void trace_kernel(const struct node *node, const struct gpu *gpu, int64_t at_ns, int32_t pid, const char *job);

#endif
