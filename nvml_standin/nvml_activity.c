/* NVML entry points for what a GPU is doing: utilisation, clocks, processes, memory, GPM. */
#define _GNU_SOURCE
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "call.h"

#define MEMORY_BYTES (UINT64_C(143771) << 20)
#define PROCESS_BYTES (UINT64_C(120) << 30)
#define MEMORY_CLOCK_MHZ 3201

nvmlReturn_t nvmlDeviceGetUtilizationRates(nvmlDevice_t device, nvmlUtilization_t *utilization)
{
    struct call call;
    struct reading reading;
    nvmlReturn_t code = utilization == NULL ? NVML_ERROR_INVALID_ARGUMENT : call_begin(&call, __func__, device);

    if (code != NVML_SUCCESS)
        return code;
    if (call.gpu->mig)
        return call_end(&call, NVML_ERROR_NOT_SUPPORTED);
    reading = gpu_read(call.gpu, call.now_ns);
    utilization->gpu = reading.busy ? 100 : 0;
    utilization->memory = (unsigned int)lround(100 * reading.rate[COPY_ACTIVE]);
    return call_end(&call, NVML_SUCCESS);
}

static unsigned int sm_clock_mhz(const struct call *call)
{
    return (unsigned int)(SM_CLOCK_MAX_MHZ * gpu_read(call->gpu, call->now_ns).clock);
}

nvmlReturn_t nvmlDeviceGetClockInfo(nvmlDevice_t device, nvmlClockType_t type, unsigned int *clock)
{
    struct call call;
    nvmlReturn_t code = clock == NULL ? NVML_ERROR_INVALID_ARGUMENT : call_begin(&call, __func__, device);

    if (code != NVML_SUCCESS)
        return code;
    *clock = type == NVML_CLOCK_MEM ? MEMORY_CLOCK_MHZ : sm_clock_mhz(&call);
    return call_end(&call, NVML_SUCCESS);
}

nvmlReturn_t nvmlDeviceGetMaxClockInfo(nvmlDevice_t device, nvmlClockType_t type, unsigned int *clock)
{
    struct call call;
    nvmlReturn_t code = clock == NULL ? NVML_ERROR_INVALID_ARGUMENT : call_begin(&call, __func__, device);

    if (code != NVML_SUCCESS)
        return code;
    *clock = type == NVML_CLOCK_MEM ? MEMORY_CLOCK_MHZ : (unsigned int)SM_CLOCK_MAX_MHZ;
    return call_end(&call, NVML_SUCCESS);
}

static unsigned long long event_reasons(const struct call *call)
{
    struct reading reading = gpu_read(call->gpu, call->now_ns);
    unsigned long long reasons = 0;

    if (!reading.busy)
        return nvmlClocksEventReasonGpuIdle;
    if (reading.power_capped)
        reasons |= nvmlClocksEventReasonSwPowerCap;
    if (call->gpu->clock_limit < 1)
        reasons |= nvmlClocksEventReasonSwThermalSlowdown;
    return reasons;
}

GETTER(nvmlDeviceGetCurrentClocksEventReasons, unsigned long long, event_reasons(&call))
GETTER(nvmlDeviceGetCurrentClocksThrottleReasons, unsigned long long, event_reasons(&call))

nvmlReturn_t nvmlDeviceGetTemperature(nvmlDevice_t device, nvmlTemperatureSensors_t sensor, unsigned int *celsius)
{
    struct call call;
    nvmlReturn_t code = celsius == NULL || sensor != NVML_TEMPERATURE_GPU ? NVML_ERROR_INVALID_ARGUMENT
                                                                         : call_begin(&call, __func__, device);

    if (code != NVML_SUCCESS)
        return code;
    *celsius = (unsigned int)(26 + 0.06 * gpu_average_w(call.gpu, call.now_ns, NS_PER_S));
    return call_end(&call, NVML_SUCCESS);
}

nvmlReturn_t nvmlDeviceGetMemoryInfo(nvmlDevice_t device, nvmlMemory_t *memory)
{
    struct call call;
    nvmlReturn_t code = memory == NULL ? NVML_ERROR_INVALID_ARGUMENT : call_begin(&call, __func__, device);

    if (code != NVML_SUCCESS)
        return code;
    memory->total = MEMORY_BYTES;
    memory->used = gpu_demands(call.gpu) > 0 ? PROCESS_BYTES : 0;
    memory->free = memory->total - memory->used;
    return call_end(&call, NVML_SUCCESS);
}

nvmlReturn_t nvmlDeviceGetMemoryInfo_v2(nvmlDevice_t device, nvmlMemory_v2_t *memory)
{
    nvmlMemory_t plain;
    nvmlReturn_t code = memory == NULL ? NVML_ERROR_INVALID_ARGUMENT : nvmlDeviceGetMemoryInfo(device, &plain);

    if (code != NVML_SUCCESS)
        return code;
    memory->total = plain.total;
    memory->used = plain.used;
    memory->free = plain.free;
    memory->reserved = 0;
    return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetComputeRunningProcesses_v3(nvmlDevice_t device, unsigned int *count,
                                                     nvmlProcessInfo_t *processes)
{
    struct call call;
    unsigned int room, present, filled = 0;
    nvmlReturn_t code = count == NULL ? NVML_ERROR_INVALID_ARGUMENT : call_begin(&call, __func__, device);

    if (code != NVML_SUCCESS)
        return code;
    room = processes == NULL ? 0 : *count;
    present = gpu_demands(call.gpu);
    if (present > room) {
        *count = present;
        return call_end(&call, NVML_ERROR_INSUFFICIENT_SIZE);
    }
    for (int i = 0; i < MAX_DEMANDS; i++) {
        const struct demand *demand = &call.gpu->demand[i];
        if (demand->process.pid == 0)
            continue;
        processes[filled++] = (nvmlProcessInfo_t){
            .pid = (unsigned int)demand->process.pid,
            .usedGpuMemory = PROCESS_BYTES / present,
            .gpuInstanceId = 0xFFFFFFFF,
            .computeInstanceId = 0xFFFFFFFF,
        };
    }
    *count = filled;
    return call_end(&call, NVML_SUCCESS);
}

/* A GPM sample is a snapshot of what has accumulated; a metric is the difference of two over the time between. */
struct nvmlGpmSample_st {
    int64_t at_ns; /* 0: not taken yet */
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
    sample->at_ns = call.now_ns;
    memcpy(sample->counter, gpu_read(call.gpu, call.now_ns).counter, sizeof sample->counter);
    return call_end(&call, NVML_SUCCESS);
}

nvmlReturn_t nvmlGpmQueryDeviceSupport(nvmlDevice_t device, nvmlGpmSupport_t *support)
{
    struct call call;
    nvmlReturn_t code = support == NULL ? NVML_ERROR_INVALID_ARGUMENT : call_begin(&call, __func__, device);

    if (code != NVML_SUCCESS)
        return code;
    support->isSupportedDevice = 1;
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

nvmlReturn_t nvmlGpmMetricsGet(nvmlGpmMetricsGet_t *get)
{
    double window_s;

    if (current_node() == NULL)
        return NVML_ERROR_UNINITIALIZED;
    if (get == NULL || get->sample1 == NULL || get->sample2 == NULL || get->numMetrics > NVML_GPM_METRIC_MAX)
        return NVML_ERROR_INVALID_ARGUMENT;
    if (get->version != NVML_GPM_METRICS_GET_VERSION)
        return NVML_ERROR_ARGUMENT_VERSION_MISMATCH;
    window_s = (double)(get->sample2->at_ns - get->sample1->at_ns) / (double)NS_PER_S;
    if (get->sample1->at_ns == 0 || window_s <= 0)
        return NVML_ERROR_INVALID_ARGUMENT;
    for (unsigned int i = 0; i < get->numMetrics; i++) {
        int counter = gpm_counter(get->metrics[i].metricId);
        get->metrics[i].nvmlReturn = counter < 0 ? NVML_ERROR_NOT_SUPPORTED : NVML_SUCCESS;
        get->metrics[i].value =
            counter < 0 ? 0 : 100 * (get->sample2->counter[counter] - get->sample1->counter[counter]) / window_s;
    }
    return NVML_SUCCESS;
}
