#include "physics.h"

#include <math.h>

double relative_voltage(double clock)
{
    double above_knee = clock - 0.521;
    return above_knee <= 0 ? 1.0 : 1.0 + 1.345 * pow(above_knee, 2.135);
}

double step_time(const struct workload *workload, double clock)
{
    return workload->compute_share / clock + (1.0 - workload->compute_share);
}

double power_w(const struct workload *workload, double clock)
{
    double time = step_time(workload, clock);
    double voltage = relative_voltage(clock);
    double busy = 0.35 + 0.65 * (workload->compute_share / clock) / time;
    return 74.4 + workload->kappa_w * clock * voltage * voltage * busy + workload->memory_w / time;
}

double clock_for_cap(const struct workload *workload, double cap_w, double lowest, double highest)
{
    double low = lowest;
    double high = highest;

    if (power_w(workload, high) <= cap_w)
        return high;
    if (power_w(workload, low) >= cap_w)
        return low;
    for (int i = 0; i < 60; i++) { /* power rises with the clock, so bisection meets the cap */
        double middle = 0.5 * (low + high);
        if (power_w(workload, middle) <= cap_w)
            low = middle;
        else
            high = middle;
    }
    return low;
}
