/* How a test breaks a node behind NVML's back: quantities that it sets, faults that it plants, boards that it swaps. */
#define _GNU_SOURCE
#include <errno.h>
#include <math.h>
#include <stddef.h>
#include <string.h>

#include "control.h"
#include "gpu.h"

#define XID_FALLEN_OFF_THE_BUS 79
#define XID_UNCONTAINED_ECC 95
#define NVML_EVENT_XID UINT64_C(0x8)
#define NVML_GPU_IS_LOST 15
#define NVML_RESET_REQUIRED 16

/* Prototypes for the compiler only: the callers are in Python. */
PFI_EXPORT int pfi_poke(struct node *node, int gpu, const char *what, double value);
PFI_EXPORT int pfi_fault(struct node *node, const struct pfi_fault_spec *spec);
PFI_EXPORT int pfi_clear_faults(struct node *node);
PFI_EXPORT int64_t pfi_faults_fired(struct node *node);
PFI_EXPORT int pfi_reset(struct node *node, int gpu);
PFI_EXPORT int pfi_set_mig(struct node *node, int gpu, int slices);
PFI_EXPORT int pfi_replace(struct node *node, int gpu, const char *uuid);

enum quantity_type { INTEGER, FLAG, REAL };

/* What follows from a change. */
enum consequence { NOTHING, SETTLE, LIMITS };

static const struct quantity {
    const char *name;
    size_t offset;
    enum quantity_type type;
    enum consequence consequence;
} quantities[] = {
    {"minor", offsetof(struct gpu, minor), INTEGER, NOTHING},
    {"min_mw", offsetof(struct gpu, min_mw), INTEGER, NOTHING},
    {"max_mw", offsetof(struct gpu, max_mw), INTEGER, NOTHING},
    {"default_mw", offsetof(struct gpu, default_mw), INTEGER, NOTHING},
    {"bmc_mw", offsetof(struct gpu, bmc_mw), INTEGER, LIMITS},
    {"module_mw", offsetof(struct gpu, module_mw), INTEGER, LIMITS},
    {"module_rest_mw", offsetof(struct gpu, module_rest_mw), INTEGER, LIMITS},
    {"granularity_mw", offsetof(struct gpu, granularity_mw), INTEGER, NOTHING},
    {"effect_us", offsetof(struct gpu, effect_us), INTEGER, NOTHING},
    {"tau_ms", offsetof(struct gpu, tau_ms), INTEGER, SETTLE},
    {"idle_w", offsetof(struct gpu, idle_w), REAL, SETTLE},
    {"slowdown", offsetof(struct gpu, slowdown), INTEGER, NOTHING},
    {"sensor_step_mw", offsetof(struct gpu, sensor.step_mw), INTEGER, NOTHING},
    {"sensor_period_ms", offsetof(struct gpu, sensor.period_ms), INTEGER, NOTHING},
    {"sensor_window_ms", offsetof(struct gpu, sensor.window_ms), INTEGER, NOTHING},
    {"energy_offset_mj", offsetof(struct gpu, sensor.energy_offset_mj), REAL, NOTHING},
    {"persistence", offsetof(struct gpu, persistence), FLAG, NOTHING},
    {"hidden", offsetof(struct gpu, hidden), FLAG, NOTHING},
    {"pids", offsetof(struct gpu, pids), INTEGER, NOTHING},
    {"resident_pid", offsetof(struct gpu, resident_pid), INTEGER, NOTHING},
    {"no_gpm", offsetof(struct gpu, no_gpm), FLAG, NOTHING},
    {"gpm_window_ms", offsetof(struct gpu, gpm_window_ms), INTEGER, NOTHING},
    {"gpm_zeroes", offsetof(struct gpu, gpm_zeroes), FLAG, NOTHING},
    {"orphan_hang_ms", offsetof(struct gpu, orphan_hang_ms), INTEGER, NOTHING},
};

static int poke_quantity(struct node *node, struct gpu *gpu, const char *what, double value, int64_t now_ns)
{
    for (size_t i = 0; i < sizeof quantities / sizeof quantities[0]; i++) {
        const struct quantity *quantity = &quantities[i];
        void *place = (char *)gpu + quantity->offset;

        if (strcmp(what, quantity->name) != 0)
            continue;
        if (quantity->type == REAL)
            *(double *)place = value;
        else if (value < 0 || value > INT32_MAX)
            return -EINVAL;
        else
            *(uint32_t *)place = quantity->type == FLAG ? value != 0 : (uint32_t)value;
        if (quantity->consequence == SETTLE)
            gpu_settle(gpu, now_ns);
        else if (quantity->consequence == LIMITS)
            gpu_limits_changed(node, gpu, process_self().pid, now_ns);
        return 0;
    }
    return -EINVAL;
}

static int slot_of(const struct node *node, const struct gpu *gpu)
{
    return (int)(gpu - node->state->gpu);
}

static void set_sticky(struct node *node, struct gpu *gpu, int32_t code)
{
    if (code == NVML_GPU_IS_LOST && gpu->sticky_code != code)
        event_post(node->state, slot_of(node, gpu), NVML_EVENT_XID, XID_FALLEN_OFF_THE_BUS);
    if (code == NVML_RESET_REQUIRED && gpu->sticky_code != code)
        event_post(node->state, slot_of(node, gpu), NVML_EVENT_XID, XID_UNCONTAINED_ECC);
    gpu->sticky_code = code;
}

static void reset(struct node *node, struct gpu *gpu, int64_t now_ns)
{
    gpu->sticky_code = 0;
    gpu->wedged_until_ns = 0;
    gpu_lose_limit(node, gpu, now_ns);
}

static int poke_gpu(struct node *node, struct gpu *gpu, const char *what, double value, int64_t now_ns)
{
    if (strcmp(what, "requested_mw") == 0)
        gpu_request_limit(node, gpu, (uint32_t)value, process_self().pid, now_ns);
    else if (strcmp(what, "reset") == 0)
        reset(node, gpu, now_ns);
    else if (strcmp(what, "sticky_code") == 0)
        set_sticky(node, gpu, (int32_t)value);
    else if (strcmp(what, "xid") == 0)
        event_post(node->state, slot_of(node, gpu), NVML_EVENT_XID, (uint64_t)value);
    else if (strcmp(what, "mig") == 0)
        gpu->mig = (int32_t)fmin(MAX_SLICES, fmax(0, value));
    else if (strcmp(what, "clock_limit") == 0 || strcmp(what, "clock_floor") == 0) {
        double *clock = strcmp(what, "clock_limit") == 0 ? &gpu->clock_limit : &gpu->clock_floor;
        *clock = fmin(1.0, fmax(CLOCK_MIN, value));
        gpu_settle(gpu, now_ns);
    } else
        return poke_quantity(node, gpu, what, value, now_ns);
    return 0;
}

static int poke_node(struct state *state, const char *what, double value)
{
    if (strcmp(what, "init_code") == 0)
        state->init_code = (int32_t)value;
    else if (strcmp(what, "rotation") == 0)
        state->rotation = (uint32_t)value;
    else if (strcmp(what, "manual_ns") == 0)
        state->manual_ns = (int64_t)value;
    else if (strcmp(what, "advance_ns") == 0 && state->manual_ns != 0)
        state->manual_ns += (int64_t)value;
    else
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
    now_ns = control_enter(node);
    if (gpu == -1)
        result = poke_node(state, what, value);
    if (result != 0) {
        int first = gpu == -1 ? 0 : gpu;
        int last = gpu == -1 ? (int)state->n_gpus - 1 : gpu;
        for (int i = first; i <= last; i++)
            result = poke_gpu(node, &state->gpu[i], what, value, now_ns);
    }
    node_unlock(node);
    return result;
}

/* A spent fault makes room, unless somebody may still be hanging in it. */
static bool is_free(const struct fault *fault)
{
    return fault->function[0] == '\0' ||
           (fault->count == 0 && fault->kind != FAULT_HANG && fault->kind != FAULT_APPLIED);
}

int pfi_fault(struct node *node, const struct pfi_fault_spec *spec)
{
    int result = -ENOSPC;

    if (!node->may_control)
        return -EPERM;
    if (spec->function[0] == '\0' || memchr(spec->function, '\0', FUNCTION_LEN) == NULL || spec->gpu < -1 ||
        spec->gpu >= (int)node->state->n_gpus || spec->kind < FAULT_CODE || spec->kind > FAULT_HANG ||
        spec->after < 0 || spec->delay_us < 0)
        return -EINVAL;
    node_lock(node);
    for (int i = 0; i < MAX_FAULTS; i++) {
        struct fault *fault = &node->state->fault[i];
        if (!is_free(fault))
            continue;
        *fault = (struct fault){
            .gpu = spec->gpu,
            .kind = spec->kind,
            .code = spec->code,
            .after = spec->after,
            .count = spec->count,
            .field = spec->field,
            .delay_us = spec->delay_us,
            .value = spec->value,
            .serial = ++node->state->serial,
        };
        strcpy(fault->function, spec->function);
        result = 0;
        break;
    }
    node_unlock(node);
    return result;
}

/* Ends planted faults and what makes a GPU answer wrongly. What a GPU is (limits, MIG, clocks, sensor) stays. */
int pfi_clear_faults(struct node *node)
{
    if (!node->may_control)
        return -EPERM;
    node_lock(node);
    memset(node->state->fault, 0, sizeof node->state->fault);
    node->state->faults_fired = 0;
    node->state->init_code = 0;
    for (uint32_t i = 0; i < node->state->n_gpus; i++) {
        struct gpu *gpu = &node->state->gpu[i];
        gpu->sticky_code = gpu->hidden = 0;
        gpu->pids = PIDS_TRUE;
        gpu->resident_pid = 0;
        gpu->sensor.energy_offset_mj = 0;
        gpu->no_gpm = gpu->gpm_zeroes = 0;
        gpu->orphan_hang_ms = 0;
        gpu->wedged_until_ns = 0;
        memset(gpu->inside, 0, sizeof gpu->inside);
    }
    node_unlock(node);
    return 0;
}

/* How many times any planted fault was met since they were last cleared. */
int64_t pfi_faults_fired(struct node *node)
{
    int64_t fired;

    node_lock(node);
    fired = node->state->faults_fired;
    node_unlock(node);
    return fired;
}

/* An initialised client holds every GPU, and a job those that it uses. */
static bool is_held(const struct node *node, const struct gpu *gpu)
{
    for (int i = 0; i < MAX_CLIENTS; i++)
        if (node->state->client[i].process.pid != 0)
            return true;
    return gpu_demands(gpu) > 0;
}

/* What an administrator does to a GPU, which the driver refuses while anyone holds it. The lock is held on success. */
static int begin_service(struct node *node, int gpu, int64_t *now_ns)
{
    if (!node->may_control)
        return -EPERM;
    if (gpu < 0 || gpu >= (int)node->state->n_gpus)
        return -EINVAL;
    *now_ns = control_enter(node);
    node_sweep(node, *now_ns);
    if (!is_held(node, &node->state->gpu[gpu]))
        return 0;
    node_unlock(node);
    return -EBUSY;
}

/* nvidia-smi --gpu-reset. -EBUSY while anyone holds the GPU. */
int pfi_reset(struct node *node, int gpu)
{
    int64_t now_ns;
    int result = begin_service(node, gpu, &now_ns);

    if (result != 0)
        return result;
    reset(node, &node->state->gpu[gpu], now_ns);
    node_unlock(node);
    return 0;
}

/* nvidia-smi --multi-instance-gpu, and the slices made: 0 for none. -EBUSY while anyone holds the GPU. */
int pfi_set_mig(struct node *node, int gpu, int slices)
{
    int64_t now_ns;
    int result = slices < 0 || slices > MAX_SLICES ? -EINVAL : begin_service(node, gpu, &now_ns);

    if (result != 0)
        return result;
    node->state->gpu[gpu].mig = slices;
    reset(node, &node->state->gpu[gpu], now_ns);
    node_unlock(node);
    return 0;
}

/* Another board in the slot, with its default limit; handles of the old one answer GPU_IS_LOST from now on. */
int pfi_replace(struct node *node, int gpu, const char *uuid)
{
    struct gpu *board;
    int64_t now_ns;

    if (!node->may_control)
        return -EPERM;
    if (gpu < 0 || gpu >= (int)node->state->n_gpus || strlen(uuid) == 0 || strlen(uuid) >= UUID_LEN)
        return -EINVAL;
    now_ns = control_enter(node);
    board = &node->state->gpu[gpu];
    memset(board->demand, 0, sizeof board->demand);
    gpu_settle(board, now_ns);
    reset(node, board, now_ns);
    memset(board->uuid, 0, sizeof board->uuid);
    strcpy(board->uuid, uuid);
    board->generation++;
    trace_limit(node, board, now_ns, 0);
    node_unlock(node);
    return 0;
}
