/* NVML entry points for what a GPU is doing: utilisation, clocks, processes, memory. */
#define _GNU_SOURCE
#include <math.h>

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
    utilization->gpu = (unsigned int)whole(call_value(&call, 0, reading.busy ? 100 : 0));
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
    *clock = (unsigned int)whole(
        call_value(&call, 0, type == NVML_CLOCK_MEM ? MEMORY_CLOCK_MHZ : sm_clock_mhz(&call)));
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
        reasons |= call->gpu->slowdown != 0 ? call->gpu->slowdown : nvmlClocksEventReasonSwThermalSlowdown;
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
    *celsius = (unsigned int)(26 + 0.06 * gpu_mean_w(call.gpu, call.now_ns - NS_PER_S, call.now_ns));
    return call_end(&call, NVML_SUCCESS);
}

nvmlReturn_t nvmlDeviceGetMemoryInfo(nvmlDevice_t device, nvmlMemory_t *memory)
{
    struct call call;
    nvmlReturn_t code = memory == NULL ? NVML_ERROR_INVALID_ARGUMENT : call_begin_any(&call, __func__, device);
    uint64_t parts;

    if (code != NVML_SUCCESS)
        return code;
    parts = call.slice == BOARD ? 1 : MAX_SLICES;
    memory->total = MEMORY_BYTES / parts;
    memory->used = gpu_demands(call.gpu) > 0 || call.gpu->resident_pid != 0 ? PROCESS_BYTES / parts : 0;
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

static unsigned int pid_shown(const struct gpu *gpu, int32_t pid)
{
    switch (gpu->pids) {
    case PIDS_ZERO:
        return 0;
    case PIDS_FOREIGN:
        return (unsigned int)pid + (1U << 22); /* above the kernel's greatest pid */
    default:
        return (unsigned int)pid;
    }
}

/* The processes of a device, or of one slice: the demands are dealt out to the slices in turn. */
nvmlReturn_t nvmlDeviceGetComputeRunningProcesses_v3(nvmlDevice_t device, unsigned int *count,
                                                     nvmlProcessInfo_t *processes)
{
    struct call call;
    int32_t pids[MAX_DEMANDS + 1];
    unsigned int slices[MAX_DEMANDS + 1];
    unsigned int room, present = 0;
    nvmlReturn_t code = count == NULL ? NVML_ERROR_INVALID_ARGUMENT : call_begin_any(&call, __func__, device);

    if (code != NVML_SUCCESS)
        return code;
    for (int i = 0; i <= MAX_DEMANDS; i++) {
        int slice = call.gpu->mig == 0 ? BOARD : i % call.gpu->mig;
        pids[present] = i < MAX_DEMANDS ? call.gpu->demand[i].process.pid : call.gpu->resident_pid;
        slices[present] = slice == BOARD ? 0xFFFFFFFF : (unsigned int)slice;
        present += pids[present] != 0 && (call.slice == BOARD || call.slice == slice);
    }
    room = processes == NULL ? 0 : *count;
    *count = present;
    if (present > room)
        return call_end(&call, NVML_ERROR_INSUFFICIENT_SIZE);
    for (unsigned int i = 0; i < present; i++) {
        processes[i] = (nvmlProcessInfo_t){
            .pid = pid_shown(call.gpu, pids[i]),
            .usedGpuMemory = PROCESS_BYTES / present,
            .gpuInstanceId = slices[i] == 0xFFFFFFFF ? slices[i] : 7 + slices[i],
            .computeInstanceId = slices[i] == 0xFFFFFFFF ? slices[i] : 0,
        };
    }
    return call_end(&call, NVML_SUCCESS);
}
