/* NVML entry points for power: limits, draw, energy, persistence. */
#define _GNU_SOURCE
#include "call.h"

GETTER(nvmlDeviceGetPersistenceMode, nvmlEnableState_t, call.gpu->persistence)
GETTER(nvmlDeviceGetPowerManagementMode, nvmlEnableState_t, NVML_FEATURE_ENABLED)
GETTER(nvmlDeviceGetPowerManagementLimit, unsigned int, call.gpu->requested_mw)
GETTER(nvmlDeviceGetPowerManagementDefaultLimit, unsigned int, call.gpu->default_mw)
GETTER(nvmlDeviceGetEnforcedPowerLimit, unsigned int, call.gpu->effective_mw)
GETTER(nvmlDeviceGetPowerUsage, unsigned int, gpu_average_w(call.gpu, call.now_ns, NS_PER_S) * 1000)
GETTER(nvmlDeviceGetTotalEnergyConsumption, unsigned long long, gpu_read(call.gpu, call.now_ns).energy_j * 1000)

nvmlReturn_t nvmlDeviceGetPowerManagementLimitConstraints(nvmlDevice_t device, unsigned int *least,
                                                          unsigned int *greatest)
{
    struct call call;
    nvmlReturn_t code = call_begin(&call, __func__, device);

    if (code != NVML_SUCCESS)
        return code;
    if (least == NULL || greatest == NULL)
        return call_end(&call, NVML_ERROR_INVALID_ARGUMENT);
    *least = call.gpu->min_mw;
    *greatest = call.gpu->max_mw;
    return call_end(&call, NVML_SUCCESS);
}

static nvmlReturn_t set_limit(struct call *call, unsigned int limit_mw)
{
    if (!may_set(call->node))
        return NVML_ERROR_NO_PERMISSION;
    if (limit_mw < call->gpu->min_mw || limit_mw > call->gpu->max_mw)
        return NVML_ERROR_INVALID_ARGUMENT;
    if (!call->silent)
        gpu_request_limit(call->node, call->gpu, limit_mw, process_self().pid, call->now_ns);
    return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceSetPowerManagementLimit(nvmlDevice_t device, unsigned int limit_mw)
{
    struct call call;
    nvmlReturn_t code = call_begin(&call, __func__, device);

    return code != NVML_SUCCESS ? code : call_end(&call, set_limit(&call, limit_mw));
}

nvmlReturn_t nvmlDeviceSetPowerManagementLimit_v2(nvmlDevice_t device, nvmlPowerValue_v2_t *value)
{
    struct call call;
    nvmlReturn_t code;

    if (value == NULL || value->version != nvmlPowerValue_v2)
        return value == NULL ? NVML_ERROR_INVALID_ARGUMENT : NVML_ERROR_ARGUMENT_VERSION_MISMATCH;
    code = call_begin(&call, __func__, device);
    if (code != NVML_SUCCESS)
        return code;
    if (value->powerScope != NVML_POWER_SCOPE_GPU)
        return call_end(&call, NVML_ERROR_NOT_SUPPORTED);
    return call_end(&call, set_limit(&call, value->powerValueMw));
}

nvmlReturn_t nvmlDeviceSetPersistenceMode(nvmlDevice_t device, nvmlEnableState_t mode)
{
    struct call call;
    nvmlReturn_t code = call_begin(&call, __func__, device);

    if (code != NVML_SUCCESS)
        return code;
    if (!may_set(call.node))
        return call_end(&call, NVML_ERROR_NO_PERMISSION);
    if (mode != NVML_FEATURE_ENABLED && mode != NVML_FEATURE_DISABLED)
        return call_end(&call, NVML_ERROR_INVALID_ARGUMENT);
    if (!call.silent)
        call.gpu->persistence = mode == NVML_FEATURE_ENABLED;
    return call_end(&call, NVML_SUCCESS);
}

static void fill_uint(nvmlFieldValue_t *field, double value)
{
    field->valueType = NVML_VALUE_TYPE_UNSIGNED_INT;
    field->value.uiVal = (unsigned int)value;
}

static void fill_energy(nvmlFieldValue_t *field, double energy_j)
{
    field->valueType = NVML_VALUE_TYPE_UNSIGNED_LONG_LONG;
    field->value.ullVal = (unsigned long long)(energy_j * 1000);
}

static nvmlReturn_t fill_field(const struct call *call, nvmlFieldValue_t *field)
{
    const struct gpu *gpu = call->gpu;

    if (field->scopeId != NVML_POWER_SCOPE_GPU)
        return NVML_ERROR_NOT_SUPPORTED;
    switch (field->fieldId) {
    case NVML_FI_DEV_POWER_AVERAGE:
        fill_uint(field, gpu_average_w(gpu, call->now_ns, NS_PER_S) * 1000);
        break;
    case NVML_FI_DEV_POWER_INSTANT:
        fill_uint(field, gpu_read(gpu, call->now_ns).draw_w * 1000);
        break;
    case NVML_FI_DEV_POWER_MIN_LIMIT:
        fill_uint(field, gpu->min_mw);
        break;
    case NVML_FI_DEV_POWER_MAX_LIMIT:
        fill_uint(field, gpu->max_mw);
        break;
    case NVML_FI_DEV_POWER_DEFAULT_LIMIT:
        fill_uint(field, gpu->default_mw);
        break;
    case NVML_FI_DEV_POWER_CURRENT_LIMIT:
        fill_uint(field, gpu->effective_mw);
        break;
    case NVML_FI_DEV_POWER_REQUESTED_LIMIT:
        fill_uint(field, gpu->requested_mw);
        break;
    case NVML_FI_DEV_ENERGY:
    case NVML_FI_DEV_TOTAL_ENERGY_CONSUMPTION:
        fill_energy(field, gpu_read(gpu, call->now_ns).energy_j);
        break;
    default:
        return NVML_ERROR_NOT_SUPPORTED;
    }
    return NVML_SUCCESS;
}

/* Each field has its own code; the call as a whole succeeds. */
nvmlReturn_t nvmlDeviceGetFieldValues(nvmlDevice_t device, int count, nvmlFieldValue_t *values)
{
    struct call call;
    nvmlReturn_t code;

    if (count < 0 || (count > 0 && values == NULL))
        return NVML_ERROR_INVALID_ARGUMENT;
    code = call_begin(&call, __func__, device);
    if (code != NVML_SUCCESS)
        return code;
    for (int i = 0; i < count; i++) {
        values[i].timestamp = call.now_ns / 1000;
        values[i].latencyUsec = 0;
        values[i].nvmlReturn = fill_field(&call, &values[i]);
    }
    return call_end(&call, NVML_SUCCESS);
}
