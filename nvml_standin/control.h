/* The side that is not NVML: how a test makes a node, looks at it and breaks it, and how a training job uses a GPU.
 *
 * All functions return 0 or a count on success and a negative errno otherwise. A handle comes from pfi_open. */
#ifndef PFI_CONTROL_H
#define PFI_CONTROL_H

#include "state.h"

/* Locks, and brings every GPU up to now; returns now. */
int64_t control_enter(struct node *node);

/* These layouts are repeated in testbed/gpus.py; pfi_layout returns their sizes for comparison. */
struct pfi_gpu_spec {
    char uuid[UUID_LEN];
    char pci[PCI_LEN];
    uint32_t minor;
    uint32_t min_mw, max_mw, default_mw;
    uint32_t effect_us, tau_ms;
    double idle_w;
};

struct pfi_gpu_view {
    int64_t mono_ns;
    char uuid[UUID_LEN];
    char job[JOB_LEN]; /* of the latest process on the GPU, empty: idle */
    uint32_t minor, index;
    uint32_t requested_mw, effective_mw, default_mw, bmc_mw;
    int32_t owner_pid;
    uint32_t demands;
    double draw_w, energy_j, work_s, clock;
};

/* A fault to plant; the fields are those of struct fault. */
struct pfi_fault_spec {
    char function[FUNCTION_LEN];
    int32_t gpu, kind, code, after, count, field;
    int64_t delay_us;
    double value;
};

#endif
