/* NVML entry points for power: limits, draw, energy, persistence. */
#define _GNU_SOURCE
#include "call.h"

#define MODULE_MIN_MW 200000U
#define MODULE_MAX_MW 1000000U

GETTER(nvmlDeviceGetPersistenceMode, nvmlEnableState_t, call.gpu->persistence)
GETTER(nvmlDeviceGetPowerManagementMode, nvmlEnableState_t, NVML_FEATURE_ENABLED)
GETTER(nvmlDeviceGetPowerManagementLimit, unsigned int, call.gpu->requested_mw)
GETTER(nvmlDeviceGetPowerManagementDefaultLimit, unsigned int, call.gpu->default_mw)
GETTER(nvmlDeviceGetEnforcedPowerLimit, unsigned int, call.gpu->effective_mw)
GETTER(nvmlDeviceGetPowerUsage, unsigned int, sensor_average_mw(call.gpu, call.now_ns))
GETTER(nvmlDeviceGetTotalEnergyConsumption, unsigned long long, sensor_energy_mj(call.gpu, call.now_ns))

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

static nvmlReturn_t set_module_limit(struct call *call, unsigned int limit_mw)
{
    if (call->gpu->module_mw == 0)
        return NVML_ERROR_NOT_SUPPORTED;
    if (!may_set(call->node))
        return NVML_ERROR_NO_PERMISSION;
    if (limit_mw < MODULE_MIN_MW || limit_mw > MODULE_MAX_MW || limit_mw <= call->gpu->module_rest_mw)
        return NVML_ERROR_INVALID_ARGUMENT;
    if (!call->silent) {
        call->gpu->module_mw = limit_mw;
        gpu_limits_changed(call->node, call->gpu, process_self().pid, call->now_ns);
    }
    return NVML_SUCCESS;
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
    switch (value->powerScope) {
    case NVML_POWER_SCOPE_GPU:
        return call_end(&call, set_limit(&call, value->powerValueMw));
    case NVML_POWER_SCOPE_MODULE:
        return call_end(&call, set_module_limit(&call, value->powerValueMw));
    default:
        return call_end(&call, NVML_ERROR_NOT_SUPPORTED);
    }
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

/* One quantity of the device, mW or mJ. */
static nvmlReturn_t read_gpu_field(const struct call *call, unsigned int field, double *value)
{
    const struct gpu *gpu = call->gpu;

    switch (field) {
    case NVML_FI_DEV_POWER_AVERAGE:
        *value = sensor_average_mw(gpu, call->now_ns);
        break;
    case NVML_FI_DEV_POWER_INSTANT:
        *value = sensor_instant_mw(gpu, call->now_ns);
        break;
    case NVML_FI_DEV_POWER_MIN_LIMIT:
        *value = gpu->min_mw;
        break;
    case NVML_FI_DEV_POWER_MAX_LIMIT:
        *value = gpu->max_mw;
        break;
    case NVML_FI_DEV_POWER_DEFAULT_LIMIT:
        *value = gpu->default_mw;
        break;
    case NVML_FI_DEV_POWER_CURRENT_LIMIT:
        *value = gpu->effective_mw;
        break;
    case NVML_FI_DEV_POWER_REQUESTED_LIMIT:
        *value = gpu->requested_mw;
        break;
    case NVML_FI_DEV_ENERGY:
    case NVML_FI_DEV_TOTAL_ENERGY_CONSUMPTION:
        *value = sensor_energy_mj(gpu, call->now_ns);
        break;
    default:
        return NVML_ERROR_NOT_SUPPORTED;
    }
    return NVML_SUCCESS;
}

/* The same of the whole module, where there is one: the rest of it draws what it draws. */
static nvmlReturn_t read_module_field(const struct call *call, unsigned int field, double *value)
{
    const struct gpu *gpu = call->gpu;

    if (gpu->module_mw == 0)
        return NVML_ERROR_NOT_SUPPORTED;
    switch (field) {
    case NVML_FI_DEV_POWER_AVERAGE:
        *value = gpu->module_rest_mw + sensor_average_mw(gpu, call->now_ns);
        break;
    case NVML_FI_DEV_POWER_INSTANT:
        *value = gpu->module_rest_mw + sensor_instant_mw(gpu, call->now_ns);
        break;
    case NVML_FI_DEV_POWER_MIN_LIMIT:
        *value = MODULE_MIN_MW;
        break;
    case NVML_FI_DEV_POWER_MAX_LIMIT:
    case NVML_FI_DEV_POWER_DEFAULT_LIMIT:
        *value = MODULE_MAX_MW;
        break;
    case NVML_FI_DEV_POWER_CURRENT_LIMIT:
    case NVML_FI_DEV_POWER_REQUESTED_LIMIT:
        *value = gpu->module_mw;
        break;
    default:
        return NVML_ERROR_NOT_SUPPORTED;
    }
    return NVML_SUCCESS;
}

static nvmlReturn_t fill_field(const struct call *call, nvmlFieldValue_t *field)
{
    nvmlReturn_t code = NVML_ERROR_NOT_SUPPORTED;
    double value = 0;

    if (field->scopeId == NVML_POWER_SCOPE_GPU)
        code = read_gpu_field(call, field->fieldId, &value);
    else if (field->scopeId == NVML_POWER_SCOPE_MODULE)
        code = read_module_field(call, field->fieldId, &value);
    code = call_entry_code(call, field->fieldId, code);
    if (code != NVML_SUCCESS)
        return code;
    value = call_value(call, field->fieldId, value);
    if (field->fieldId == NVML_FI_DEV_ENERGY || field->fieldId == NVML_FI_DEV_TOTAL_ENERGY_CONSUMPTION) {
        field->valueType = NVML_VALUE_TYPE_UNSIGNED_LONG_LONG;
        field->value.ullVal = whole(value);
    } else {
        field->valueType = NVML_VALUE_TYPE_UNSIGNED_INT;
        field->value.uiVal = (unsigned int)whole(value);
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
