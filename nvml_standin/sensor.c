/* The power sensor and the energy counter: exact unless a test made them coarse, slow or wrong. */
#include <math.h>

#include "gpu.h"

#define NS_PER_MS (NS_PER_S / 1000)

/* A sensor that looks for window_ms at the end of each period, and knows nothing of the rest of it. */
static double looked_w(const struct gpu *gpu, int64_t now_ns)
{
    int64_t period_ns = gpu->sensor.period_ms * NS_PER_MS;
    int64_t end_ns = period_ns == 0 ? now_ns : now_ns - now_ns % period_ns;

    return gpu_mean_w(gpu, end_ns - gpu->sensor.window_ms * NS_PER_MS, end_ns);
}

static double in_steps_mw(const struct gpu *gpu, double draw_w)
{
    double draw_mw = draw_w * 1000;

    return gpu->sensor.step_mw > 1 ? floor(draw_mw / gpu->sensor.step_mw) * gpu->sensor.step_mw : draw_mw;
}

double sensor_instant_mw(const struct gpu *gpu, int64_t now_ns)
{
    return in_steps_mw(gpu, looked_w(gpu, now_ns));
}

/* The mean of the last second, as far as the sensor saw it. */
double sensor_average_mw(const struct gpu *gpu, int64_t now_ns)
{
    int64_t period_ns = gpu->sensor.period_ms * NS_PER_MS;
    int64_t looks = period_ns == 0 ? 0 : NS_PER_S / period_ns;
    double sum_w = 0;

    if (looks == 0)
        return in_steps_mw(gpu, period_ns == 0 ? gpu_mean_w(gpu, now_ns - NS_PER_S, now_ns) : looked_w(gpu, now_ns));
    for (int64_t i = 0; i < looks; i++)
        sum_w += looked_w(gpu, now_ns - i * period_ns);
    return in_steps_mw(gpu, sum_w / (double)looks);
}

double sensor_energy_mj(const struct gpu *gpu, int64_t now_ns)
{
    return fmax(0, gpu_read(gpu, now_ns).energy_j * 1000 + gpu->sensor.energy_offset_mj);
}
