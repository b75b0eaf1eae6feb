/* What every NVML entry point does first and last. */
#ifndef PFI_CALL_H
#define PFI_CALL_H

#define NVML_NO_UNVERSIONED_FUNC_DEFS
#pragma GCC visibility push(default)
#include <nvml.h>
#pragma GCC visibility pop

#include "gpu.h"

struct call {
    struct node *node;
    struct gpu *gpu; /* NULL for calls on no device */
    int64_t now_ns;
    bool silent;              /* a planted fault: a setter must do nothing and report success */
    nvmlReturn_t after_code;  /* a planted fault: what to answer once the work is done */
};

/* Checks initialisation and handle, meets planted faults, locks and advances the GPU. Holds the lock on success only. */
nvmlReturn_t call_begin(struct call *call, const char *function, nvmlDevice_t device);
nvmlReturn_t call_begin_system(struct call *call, const char *function);
nvmlReturn_t call_end(struct call *call, nvmlReturn_t code);

/* The node this process is initialised on, NULL if it is not (or was forked since). */
struct node *current_node(void);

nvmlDevice_t device_of(const struct node *node, const struct gpu *gpu);
bool may_set(const struct node *node);
nvmlReturn_t copy_text(char *buffer, unsigned int length, const char *text);

/* A getter of one value: locks, evaluates `expression` with `call` in scope, unlocks. */
#define GETTER(name, type, expression)                                                                               \
    nvmlReturn_t name(nvmlDevice_t device, type *value)                                                              \
    {                                                                                                                \
        struct call call;                                                                                            \
        nvmlReturn_t code;                                                                                           \
        if (value == NULL)                                                                                           \
            return NVML_ERROR_INVALID_ARGUMENT;                                                                      \
        code = call_begin(&call, #name, device);                                                                     \
        if (code != NVML_SUCCESS)                                                                                    \
            return code;                                                                                             \
        *value = (type)(expression);                                                                                 \
        return call_end(&call, NVML_SUCCESS);                                                                        \
    }

#endif
