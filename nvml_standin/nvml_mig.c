/* NVML entry points for MIG: a device that is cut into slices, each with a handle of its own.
 *
 * Limit, draw and energy belong to the device: these calls answer NOT_SUPPORTED on the handle of a slice. */
#define _GNU_SOURCE
#include "call.h"

nvmlReturn_t nvmlDeviceGetMigMode(nvmlDevice_t device, unsigned int *current, unsigned int *pending)
{
    struct call call;
    nvmlReturn_t code = call_begin(&call, __func__, device);

    if (code != NVML_SUCCESS)
        return code;
    if (current == NULL || pending == NULL)
        return call_end(&call, NVML_ERROR_INVALID_ARGUMENT);
    *current = *pending = call.gpu->mig ? NVML_DEVICE_MIG_ENABLE : NVML_DEVICE_MIG_DISABLE;
    return call_end(&call, NVML_SUCCESS);
}

nvmlReturn_t nvmlDeviceGetMigDeviceHandleByIndex(nvmlDevice_t device, unsigned int index, nvmlDevice_t *slice)
{
    struct call call;
    nvmlReturn_t code = slice == NULL ? NVML_ERROR_INVALID_ARGUMENT : call_begin(&call, __func__, device);

    if (code != NVML_SUCCESS)
        return code;
    if (index >= MAX_SLICES)
        return call_end(&call, NVML_ERROR_INVALID_ARGUMENT);
    if ((int)index >= call.gpu->mig)
        return call_end(&call, NVML_ERROR_NOT_FOUND);
    *slice = handle_of(call.node, call.gpu, (int)index);
    return call_end(&call, NVML_SUCCESS);
}

nvmlReturn_t nvmlDeviceGetDeviceHandleFromMigDeviceHandle(nvmlDevice_t slice, nvmlDevice_t *device)
{
    struct call call;
    nvmlReturn_t code = device == NULL ? NVML_ERROR_INVALID_ARGUMENT : call_begin_any(&call, __func__, slice);

    if (code != NVML_SUCCESS)
        return code;
    if (call.slice == BOARD)
        return call_end(&call, NVML_ERROR_INVALID_ARGUMENT);
    *device = handle_of(call.node, call.gpu, BOARD);
    return call_end(&call, NVML_SUCCESS);
}

/* Instance ids are those of the usual layout: counted from 7 for compute slices of one seventh. */
static nvmlReturn_t instance_id(const char *function, nvmlDevice_t device, unsigned int first, unsigned int step,
                                unsigned int *id)
{
    struct call call;
    nvmlReturn_t code = id == NULL ? NVML_ERROR_INVALID_ARGUMENT : call_begin_any(&call, function, device);

    if (code != NVML_SUCCESS)
        return code;
    if (call.slice == BOARD)
        return call_end(&call, NVML_ERROR_NOT_SUPPORTED);
    *id = first + step * (unsigned int)call.slice;
    return call_end(&call, NVML_SUCCESS);
}

nvmlReturn_t nvmlDeviceGetGpuInstanceId(nvmlDevice_t device, unsigned int *id)
{
    return instance_id(__func__, device, 7, 1, id);
}

nvmlReturn_t nvmlDeviceGetComputeInstanceId(nvmlDevice_t device, unsigned int *id)
{
    return instance_id(__func__, device, 0, 0, id);
}

GETTER(nvmlDeviceGetMaxMigDeviceCount, unsigned int, MAX_SLICES)
GETTER_ANY(nvmlDeviceIsMigDeviceHandle, unsigned int, call.slice != BOARD)
