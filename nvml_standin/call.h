/* What every NVML entry point does first and last. */
#ifndef PFI_CALL_H
#define PFI_CALL_H

#define NVML_NO_UNVERSIONED_FUNC_DEFS
#pragma GCC visibility push(default)
#include <nvml.h>
#pragma GCC visibility pop

#include "gpu.h"

enum { BOARD = -1, MAX_MET = 8 };

struct call {
    struct node *node;
    struct gpu *gpu; /* NULL for calls on no device */
    int slice;       /* of a MIG device handle; BOARD for the device as a whole */
    int64_t now_ns;
    bool silent;              /* a planted fault: a setter must do nothing and report success */
    nvmlReturn_t after_code;  /* a planted fault: what to answer once the work is done */
    const struct fault *late; /* a planted fault: answer only after its delay, or once it is cleared */
    unsigned n_met;
    struct fault met[MAX_MET]; /* planted faults of the kinds VALUE and ENTRY, for the entry point to heed */
};

/* Checks initialisation and handle, meets planted faults, locks and advances the GPU. Holds the lock on success only.
 * MIG device handles are not supported, but by call_begin_any. */
nvmlReturn_t call_begin(struct call *call, const char *function, nvmlDevice_t device);
nvmlReturn_t call_begin_any(struct call *call, const char *function, nvmlDevice_t device);
nvmlReturn_t call_begin_system(struct call *call, const char *function);
nvmlReturn_t call_end(struct call *call, nvmlReturn_t code);

/* A planted value for a field (0: for a getter of one number), else the value as it is. */
double call_value(const struct call *call, unsigned int field, double value);

/* A number as an unsigned integer of NVML; what does not fit is all ones, as NVML marks an unknown value. */
unsigned long long whole(double value);

/* A planted code for a field, else the code as it is. */
nvmlReturn_t call_entry_code(const struct call *call, unsigned int field, nvmlReturn_t code);

/* Meet planted faults of one call, the lock held: also for calls that begin otherwise. */
nvmlReturn_t call_meet_faults(struct call *call, const char *function);

nvmlReturn_t copy_text(char *buffer, unsigned int length, const char *text);

/* session.c: the node this process is initialised on, NULL if it is not (or was forked since). */
struct node *current_node(void);
unsigned session_rotation(void); /* of the NVML order, as it was at initialisation */
bool may_set(const struct node *node);

nvmlDevice_t handle_of(const struct node *node, const struct gpu *gpu, int slice);

/* The GPU and slice of a handle. INVALID_ARGUMENT for what is no handle, GPU_IS_LOST when the board was replaced. */
nvmlReturn_t handle_find(struct node *node, nvmlDevice_t device, struct gpu **gpu, int *slice);

/* A getter of one value: locks, evaluates `expression` with `call` in scope, unlocks. */
#define GETTER_BY(begin, name, type, expression)                                                                     \
    nvmlReturn_t name(nvmlDevice_t device, type *value)                                                              \
    {                                                                                                                \
        struct call call;                                                                                            \
        nvmlReturn_t code;                                                                                           \
        if (value == NULL)                                                                                           \
            return NVML_ERROR_INVALID_ARGUMENT;                                                                      \
        code = begin(&call, #name, device);                                                                          \
        if (code != NVML_SUCCESS)                                                                                    \
            return code;                                                                                             \
        *value = (type)whole(call_value(&call, 0, (double)(expression)));                                            \
        return call_end(&call, NVML_SUCCESS);                                                                        \
    }
#define GETTER(name, type, expression) GETTER_BY(call_begin, name, type, expression)
#define GETTER_ANY(name, type, expression) GETTER_BY(call_begin_any, name, type, expression)

#endif
