#define _GNU_SOURCE
#include "control.h"

#include <errno.h>
#include <math.h>
#include <stdio.h>
#include <string.h>

#include "gpu.h"

/* Prototypes for the compiler only: the callers are in Python. */
PFI_EXPORT int pfi_layout(uint32_t *spec_size, uint32_t *view_size, uint32_t *fault_size);
PFI_EXPORT int pfi_create(const char *directory, const char *model, const char *driver, const struct pfi_gpu_spec *specs,
                      uint32_t count);
PFI_EXPORT struct node *pfi_open(const char *directory);
PFI_EXPORT void pfi_close(struct node *node);
PFI_EXPORT int pfi_snapshot(struct node *node, struct pfi_gpu_view *views, uint32_t room);
PFI_EXPORT double pfi_physics(int which, double compute_share, double kappa_w, double memory_w, double x);
PFI_EXPORT void pfi_hold_lock(struct node *node);

int pfi_layout(uint32_t *spec_size, uint32_t *view_size, uint32_t *fault_size)
{
    *spec_size = sizeof(struct pfi_gpu_spec);
    *view_size = sizeof(struct pfi_gpu_view);
    *fault_size = sizeof(struct pfi_fault_spec);
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
        gpu->clock_floor = CLOCK_MIN;
        gpu->gpm_window_ms = 100;
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

int64_t control_enter(struct node *node)
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
    int64_t now_ns = control_enter(node);
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
        return clock_for_cap(&workload, x, CLOCK_MIN, 1.0);
    default:
        return NAN;
    }
}

/* For the test of the robust lock: the caller is killed while it holds the lock. */
void pfi_hold_lock(struct node *node)
{
    node_lock(node);
}
