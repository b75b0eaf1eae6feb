/* How a training job uses a GPU: registers its demand, starts kernels, counts its work. */
#define _GNU_SOURCE
#include <errno.h>
#include <math.h>
#include <string.h>

#include "control.h"
#include "gpu.h"

/* Prototypes for the compiler only: the callers are in Python. */
PFI_EXPORT int pfi_register(struct node *node, const char *uuid, double compute_share, double kappa_w, double memory_w,
                            const char *job);
PFI_EXPORT int pfi_unregister(struct node *node);
PFI_EXPORT int pfi_kernel(struct node *node, const char *job);
PFI_EXPORT int pfi_work(struct node *node, const char *job, double *work_s, uint32_t room, int64_t *at_ns);

static bool job_is_plain(const char *job)
{
    /* The text goes into the trace, which is JSON, unescaped. */
    static const char allowed[] = "0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ.:_-";
    size_t length = strlen(job);

    return length > 0 && length < JOB_LEN && strspn(job, allowed) == length;
}

/* The calling process starts to use a GPU for a job. */
int pfi_register(struct node *node, const char *uuid, double compute_share, double kappa_w, double memory_w,
                 const char *job)
{
    struct workload workload = {compute_share, kappa_w, memory_w};
    int result = -ENODEV;
    int64_t now_ns;

    if (!job_is_plain(job) || !(compute_share >= 0 && compute_share <= 1) || !(kappa_w >= 0 && kappa_w <= 5000) ||
        !(memory_w >= 0 && memory_w <= 5000))
        return -EINVAL;
    now_ns = control_enter(node);
    for (uint32_t i = 0; i < node->state->n_gpus; i++) {
        struct gpu *gpu = &node->state->gpu[i];
        if (!gpu->hidden && strcmp(gpu->uuid, uuid) == 0)
            result = gpu_add_demand(node, gpu, &workload, job, now_ns);
    }
    node_unlock(node);
    return result;
}

/* The calling process leaves all its GPUs. Returns how many. */
int pfi_unregister(struct node *node)
{
    struct process self = process_self();
    int count = 0;
    int64_t now_ns = control_enter(node);

    for (uint32_t i = 0; i < node->state->n_gpus; i++)
        count += gpu_remove_demand(&node->state->gpu[i], self, now_ns);
    node_sweep(node, now_ns);
    node_unlock(node);
    return count;
}

/* A step begins on every GPU that the calling process uses: one trace line each. Returns how many. */
int pfi_kernel(struct node *node, const char *job)
{
    struct process self = process_self();
    int count = 0;
    int64_t now_ns;

    if (!job_is_plain(job))
        return -EINVAL;
    now_ns = control_enter(node);
    for (uint32_t i = 0; i < node->state->n_gpus; i++) {
        const struct gpu *gpu = &node->state->gpu[i];
        for (int d = 0; d < MAX_DEMANDS; d++) {
            if (gpu->demand[d].process.pid != self.pid)
                continue;
            trace_kernel(node, gpu, now_ns, self.pid, job);
            count++;
        }
    }
    node_unlock(node);
    return count;
}

/* The work counters of all GPUs at one instant, which is told; NAN for a GPU that does not work for this job. Returns how many do. */
int pfi_work(struct node *node, const char *job, double *work_s, uint32_t room, int64_t *at_ns)
{
    int64_t now_ns = control_enter(node);
    int count = 0;

    *at_ns = now_ns;
    for (uint32_t i = 0; i < room; i++)
        work_s[i] = NAN;
    for (uint32_t i = 0; i < node->state->n_gpus && i < room; i++) {
        const struct gpu *gpu = &node->state->gpu[i];
        for (int d = 0; d < MAX_DEMANDS; d++)
            if (gpu->demand[d].process.pid != 0 && strcmp(gpu->demand[d].job, job) == 0)
                work_s[i] = gpu_read(gpu, now_ns).counter[WORK];
        count += !isnan(work_s[i]);
    }
    node_unlock(node);
    return count;
}
