#define _GNU_SOURCE
#include "control.h"

#include <errno.h>
#include <math.h>
#include <stdio.h>
#include <string.h>

#include "gpu.h"

#define EXPORT PFI_EXPORT

/* Prototypes for the compiler only: the callers are in Python. */
EXPORT int pfi_layout(uint32_t *spec_size, uint32_t *view_size);
EXPORT int pfi_create(const char *directory, const char *model, const char *driver, const struct pfi_gpu_spec *specs,
                      uint32_t count);
EXPORT struct node *pfi_open(const char *directory);
EXPORT void pfi_close(struct node *node);
EXPORT int pfi_snapshot(struct node *node, struct pfi_gpu_view *views, uint32_t room);
EXPORT int pfi_poke(struct node *node, int gpu, const char *what, double value);
EXPORT int pfi_fault(struct node *node, const char *function, int gpu, int kind, int code, int after, int count,
                     int64_t delay_us);
EXPORT int pfi_clear_faults(struct node *node);
EXPORT int64_t pfi_faults_fired(struct node *node);
EXPORT int pfi_register(struct node *node, const char *uuid, double compute_share, double kappa_w, double memory_w,
                        const char *job);
EXPORT int pfi_unregister(struct node *node);
EXPORT int pfi_kernel(struct node *node, const char *job);
EXPORT int pfi_work(struct node *node, const char *job, double *work_s, uint32_t room, int64_t *at_ns);
EXPORT double pfi_physics(int which, double compute_share, double kappa_w, double memory_w, double x);
EXPORT void pfi_hold_lock(struct node *node);

int pfi_layout(uint32_t *spec_size, uint32_t *view_size)
{
    *spec_size = sizeof(struct pfi_gpu_spec);
    *view_size = sizeof(struct pfi_gpu_view);
    return 0;
}

static bool ends_in(const char *text, size_t room)
{
    return memchr(text, '\0', room) != NULL;
}

/* The specs must come in PCI order: the slot decides the NVML index. */
int pfi_create(const char *directory, const char *model, const char *driver, const struct pfi_gpu_spec *specs,
               uint32_t count)
{
    struct node *node;
    struct state *state;

    if (count < 1 || count > MAX_GPUS || strlen(model) >= NAME_LEN || strlen(driver) >= NAME_LEN)
        return -EINVAL;
    for (uint32_t i = 0; i < count; i++) {
        if (!ends_in(specs[i].uuid, UUID_LEN) || !ends_in(specs[i].pci, PCI_LEN) || strlen(specs[i].pci) < 5 ||
            specs[i].min_mw > specs[i].default_mw || specs[i].default_mw > specs[i].max_mw)
            return -EINVAL;
    }
    node = node_create(directory);
    if (node == NULL)
        return -errno;
    state = node->state;
    strcpy(state->model, model);
    strcpy(state->driver, driver);
    state->n_gpus = count;
    for (uint32_t i = 0; i < count; i++) {
        struct gpu *gpu = &state->gpu[i];
        strcpy(gpu->uuid, specs[i].uuid);
        strcpy(gpu->pci, specs[i].pci);
        gpu->minor = specs[i].minor;
        gpu->min_mw = specs[i].min_mw;
        gpu->max_mw = specs[i].max_mw;
        gpu->default_mw = gpu->reference_mw = specs[i].default_mw;
        gpu->effect_us = specs[i].effect_us;
        gpu->tau_ms = specs[i].tau_ms;
        gpu->idle_w = specs[i].idle_w;
        gpu->clock_limit = 1.0;
        gpu->persistence = 1;
        gpu_start(node, gpu, node_now_ns(node));
    }
    __atomic_store_n(&state->magic, PFI_MAGIC, __ATOMIC_RELEASE);
    node_close(node);
    return 0;
}

/* NULL when the directory holds no usable state; errno says why. */
struct node *pfi_open(const char *directory)
{
    return node_open(directory);
}

void pfi_close(struct node *node)
{
    node_close(node);
}

static int64_t enter(struct node *node)
{
    int64_t now_ns;

    node_lock(node);
    now_ns = node_now_ns(node);
    node_sweep_sometimes(node, now_ns);
    for (uint32_t i = 0; i < node->state->n_gpus; i++)
        gpu_advance(node, &node->state->gpu[i], now_ns);
    return now_ns;
}

/* One record per GPU in PCI order, all at one instant. Returns how many. */
int pfi_snapshot(struct node *node, struct pfi_gpu_view *views, uint32_t room)
{
    int64_t now_ns = enter(node);
    uint32_t count = node->state->n_gpus < room ? node->state->n_gpus : room;

    for (uint32_t i = 0; i < count; i++) {
        const struct gpu *gpu = &node->state->gpu[i];
        const struct demand *owner = gpu_owner(gpu);
        struct reading reading = gpu_read(gpu, now_ns);
        struct pfi_gpu_view *view = &views[i];

        memset(view, 0, sizeof *view);
        view->mono_ns = now_ns;
        strcpy(view->uuid, gpu->uuid);
        if (owner != NULL) {
            strcpy(view->job, owner->job);
            view->owner_pid = owner->process.pid;
        }
        view->minor = gpu->minor;
        view->index = i;
        view->requested_mw = gpu->requested_mw;
        view->effective_mw = gpu->effective_mw;
        view->default_mw = gpu->default_mw;
        view->bmc_mw = gpu->bmc_mw;
        view->demands = gpu_demands(gpu);
        view->draw_w = reading.draw_w;
        view->energy_j = reading.energy_j;
        view->work_s = reading.counter[WORK];
        view->clock = reading.clock;
    }
    node_unlock(node);
    return (int)count;
}

static int poke_node(struct state *state, const char *what, double value)
{
    if (strcmp(what, "init_code") == 0)
        state->init_code = (int32_t)value;
    else if (strcmp(what, "manual_ns") == 0)
        state->manual_ns = (int64_t)value;
    else if (strcmp(what, "advance_ns") == 0 && state->manual_ns != 0)
        state->manual_ns += (int64_t)value;
    else
        return -EINVAL;
    return 0;
}

static int poke_gpu(struct node *node, struct gpu *gpu, const char *what, double value, int64_t now_ns)
{
    int32_t pid = process_self().pid;

    if (strcmp(what, "requested_mw") == 0)
        gpu_request_limit(node, gpu, (uint32_t)value, pid, now_ns);
    else if (strcmp(what, "bmc_mw") == 0)
        gpu_set_bmc_limit(node, gpu, (uint32_t)value, pid, now_ns);
    else if (strcmp(what, "reset") == 0) {
        gpu->sticky_code = 0;
        gpu_lose_limit(node, gpu, now_ns);
    } else if (strcmp(what, "min_mw") == 0)
        gpu->min_mw = (uint32_t)value;
    else if (strcmp(what, "max_mw") == 0)
        gpu->max_mw = (uint32_t)value;
    else if (strcmp(what, "default_mw") == 0)
        gpu->default_mw = (uint32_t)value;
    else if (strcmp(what, "granularity_mw") == 0)
        gpu->granularity_mw = (uint32_t)value;
    else if (strcmp(what, "effect_us") == 0)
        gpu->effect_us = (uint32_t)value;
    else if (strcmp(what, "persistence") == 0)
        gpu->persistence = value != 0;
    else if (strcmp(what, "sticky_code") == 0)
        gpu->sticky_code = (int32_t)value;
    else if (strcmp(what, "hidden") == 0)
        gpu->hidden = value != 0;
    else if (strcmp(what, "mig") == 0)
        gpu->mig = value != 0;
    else if (strcmp(what, "tau_ms") == 0) {
        gpu->tau_ms = (uint32_t)value;
        gpu_settle(gpu, now_ns);
    } else if (strcmp(what, "idle_w") == 0) {
        gpu->idle_w = value;
        gpu_settle(gpu, now_ns);
    } else if (strcmp(what, "clock_limit") == 0) {
        gpu->clock_limit = fmin(1.0, fmax(CLOCK_MIN, value));
        gpu_settle(gpu, now_ns);
    } else
        return -EINVAL;
    return 0;
}

/* gpu: slot in PCI order; -1: the node, or every GPU when the node has no such quantity. */
int pfi_poke(struct node *node, int gpu, const char *what, double value)
{
    struct state *state = node->state;
    int result = -EINVAL;
    int64_t now_ns;

    if (!node->may_control)
        return -EPERM;
    if (gpu < -1 || gpu >= (int)state->n_gpus || !isfinite(value))
        return -EINVAL;
    now_ns = enter(node);
    if (gpu == -1)
        result = poke_node(state, what, value);
    for (int i = 0; result == -EINVAL && i < (int)state->n_gpus; i++) {
        if (gpu != -1 && gpu != i)
            continue;
        int poked = poke_gpu(node, &state->gpu[i], what, value, now_ns);
        if (poked != 0 || gpu != -1 || i == (int)state->n_gpus - 1) {
            result = poked;
            break;
        }
    }
    node_unlock(node);
    return result;
}

int pfi_fault(struct node *node, const char *function, int gpu, int kind, int code, int after, int count,
              int64_t delay_us)
{
    int result = -ENOSPC;

    if (!node->may_control)
        return -EPERM;
    if (function[0] == '\0' || strlen(function) >= FUNCTION_LEN || gpu < -1 || gpu >= (int)node->state->n_gpus ||
        kind < FAULT_CODE || kind > FAULT_DELAY || after < 0 || delay_us < 0)
        return -EINVAL;
    node_lock(node);
    for (int i = 0; i < MAX_FAULTS; i++) {
        struct fault *fault = &node->state->fault[i];
        if (fault->function[0] != '\0' && fault->count != 0)
            continue;
        int64_t fired = fault->fired; /* the slot of a spent fault: keep the sum of what has fired */
        *fault = (struct fault){.gpu = gpu, .kind = kind, .code = code, .after = after, .count = count,
                                .delay_us = delay_us, .fired = fired};
        strcpy(fault->function, function);
        result = 0;
        break;
    }
    node_unlock(node);
    return result;
}

int pfi_clear_faults(struct node *node)
{
    if (!node->may_control)
        return -EPERM;
    node_lock(node);
    memset(node->state->fault, 0, sizeof node->state->fault);
    node->state->init_code = 0;
    for (uint32_t i = 0; i < node->state->n_gpus; i++)
        node->state->gpu[i].sticky_code = node->state->gpu[i].hidden = 0;
    node_unlock(node);
    return 0;
}

/* How many times any planted fault was met since they were last cleared. */
int64_t pfi_faults_fired(struct node *node)
{
    int64_t fired = 0;

    node_lock(node);
    for (int i = 0; i < MAX_FAULTS; i++)
        fired += node->state->fault[i].fired;
    node_unlock(node);
    return fired;
}

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
    now_ns = enter(node);
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
    int64_t now_ns = enter(node);

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
    now_ns = enter(node);
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
    int64_t now_ns = enter(node);
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

/* The formulas themselves, for comparison with those in Python. x: a clock share, or a cap in W. */
double pfi_physics(int which, double compute_share, double kappa_w, double memory_w, double x)
{
    struct workload workload = {compute_share, kappa_w, memory_w};

    switch (which) {
    case 0:
        return relative_voltage(x);
    case 1:
        return step_time(&workload, x);
    case 2:
        return power_w(&workload, x);
    case 3:
        return clock_for_cap(&workload, x, 1.0);
    default:
        return NAN;
    }
}

/* For the test of the robust lock: the caller is killed while it holds the lock. */
void pfi_hold_lock(struct node *node)
{
    node_lock(node);
}
