/* NVML entry points for GPM, the activity counters. */
#define _GNU_SOURCE
#include <stdlib.h>
#include <string.h>

#include "call.h"

/* A GPM sample is a snapshot of what has accumulated; a metric is the difference of two over the time between. */
struct nvmlGpmSample_st {
    int64_t at_ns; /* 0: not taken yet */
    nvmlDevice_t device;
    double counter[N_COUNTERS];
};

nvmlReturn_t nvmlGpmSampleAlloc(nvmlGpmSample_t *sample)
{
    if (sample == NULL)
        return NVML_ERROR_INVALID_ARGUMENT;
    *sample = calloc(1, sizeof **sample);
    return *sample == NULL ? NVML_ERROR_MEMORY : NVML_SUCCESS;
}

nvmlReturn_t nvmlGpmSampleFree(nvmlGpmSample_t sample)
{
    free(sample);
    return NVML_SUCCESS;
}

nvmlReturn_t nvmlGpmSampleGet(nvmlDevice_t device, nvmlGpmSample_t sample)
{
    struct call call;
    nvmlReturn_t code = sample == NULL ? NVML_ERROR_INVALID_ARGUMENT : call_begin(&call, __func__, device);

    if (code != NVML_SUCCESS)
        return code;
    if (call.gpu->no_gpm)
        return call_end(&call, NVML_ERROR_NOT_SUPPORTED);
    sample->at_ns = call.now_ns;
    sample->device = device;
    memcpy(sample->counter, gpu_read(call.gpu, call.now_ns).counter, sizeof sample->counter);
    return call_end(&call, NVML_SUCCESS);
}

nvmlReturn_t nvmlGpmQueryDeviceSupport(nvmlDevice_t device, nvmlGpmSupport_t *support)
{
    struct call call;
    nvmlReturn_t code = support == NULL ? NVML_ERROR_INVALID_ARGUMENT : call_begin(&call, __func__, device);

    if (code != NVML_SUCCESS)
        return code;
    support->isSupportedDevice = !call.gpu->no_gpm;
    return call_end(&call, NVML_SUCCESS);
}

static int gpm_counter(unsigned int metric)
{
    switch (metric) {
    case NVML_GPM_METRIC_GRAPHICS_UTIL:
    case NVML_GPM_METRIC_SM_UTIL:
        return SM_ACTIVE;
    case NVML_GPM_METRIC_ANY_TENSOR_UTIL:
        return TENSOR_ACTIVE;
    case NVML_GPM_METRIC_DRAM_BW_UTIL:
        return DRAM_ACTIVE;
    default:
        return -1;
    }
}

/* Faults of the device whose samples these are are met here too. */
nvmlReturn_t nvmlGpmMetricsGet(nvmlGpmMetricsGet_t *get)
{
    struct call call;
    nvmlReturn_t code;
    double window_s;
    bool zeroes;

    if (get == NULL || get->sample1 == NULL || get->sample2 == NULL || get->numMetrics > NVML_GPM_METRIC_MAX)
        return current_node() == NULL ? NVML_ERROR_UNINITIALIZED : NVML_ERROR_INVALID_ARGUMENT;
    if (get->version != NVML_GPM_METRICS_GET_VERSION)
        return NVML_ERROR_ARGUMENT_VERSION_MISMATCH;
    code = call_begin(&call, __func__, get->sample2->device);
    if (code != NVML_SUCCESS)
        return code;
    window_s = (double)(get->sample2->at_ns - get->sample1->at_ns) / (double)NS_PER_S;
    zeroes = window_s < call.gpu->gpm_window_ms / 1000.0 && call.gpu->gpm_zeroes;
    if (get->sample1->at_ns == 0 || window_s <= 0 ||
        (window_s < call.gpu->gpm_window_ms / 1000.0 && !call.gpu->gpm_zeroes))
        return call_end(&call, NVML_ERROR_INVALID_ARGUMENT);
    for (unsigned int i = 0; i < get->numMetrics; i++) {
        int counter = gpm_counter(get->metrics[i].metricId);
        double change = counter < 0 ? 0 : get->sample2->counter[counter] - get->sample1->counter[counter];
        get->metrics[i].nvmlReturn = counter < 0 ? NVML_ERROR_NOT_SUPPORTED : NVML_SUCCESS;
        get->metrics[i].value = zeroes ? 0 : 100 * change / window_s;
    }
    return call_end(&call, NVML_SUCCESS);
}
