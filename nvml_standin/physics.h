/* Power, clock and throughput of one GPU under a training job: formulas without state.
 *
 * The model is fitted to the published figures of arXiv 2609.11542; it is not a measurement. */
#ifndef PFI_PHYSICS_H
#define PFI_PHYSICS_H

#define CLOCK_MIN 0.106 /* 210 MHz of 1980 MHz */
#define SM_CLOCK_MAX_MHZ 1980.0

struct workload {
    double compute_share; /* a: the share of a step that follows the SM clock, 0..1 */
    double kappa_w;       /* core power factor, W */
    double memory_w;      /* M: power of the memory at full speed, W */
};

/* clock: share of the greatest SM clock, CLOCK_MIN..1. Times are relative to a step at full clock. */
double relative_voltage(double clock);
double step_time(const struct workload *workload, double clock);
double power_w(const struct workload *workload, double clock);

/* The clock in lowest..highest at which the draw meets the cap. At the lowest the draw may exceed the cap. */
double clock_for_cap(const struct workload *workload, double cap_w, double lowest, double highest);

#endif
