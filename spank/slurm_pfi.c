/*
 * slurm_pfi.so: the option --power-flex of sbatch, srun and salloc.
 *
 * The value is checked where the job is submitted and travels as SPANK_PFI_FLEX to the hooks of the node. On the node
 * this plugin does nothing and fails nothing. Without the option the environment variable PFI_FLEX counts.
 * Line for plugstack.conf: etc/plugstack.conf. `optional` there, so that a missing plugin stops no job.
 */
#include "flex.h"

#include <slurm/spank.h>
#include <stdio.h>
#include <stdlib.h>

SPANK_PLUGIN(slurm_pfi, 1);

#define VARIABLE "PFI_FLEX"
/* In a job's environment by Slurm's doing (22.05), so that what the job submits or starts has the job's own option. */
#define INHERITED "SLURM_SPANK__SLURM_SPANK_OPTION_slurm_pfi_power_flex"

static char flex[8] = ""; /* the longest word is "medium" */
static int times_given = 0;

static bool is_submission(void)
{
    spank_context_t context = spank_context();

    return context == S_CTX_LOCAL || context == S_CTX_ALLOCATOR;
}

static int read_option(int value, const char *text, int remote)
{
    (void)value;
    if (remote || !is_submission())
        return 0;
    if (text == NULL || !pfi_flex_is_valid(text)) {
        slurm_error("--power-flex=%.32s: not one of: %s", text == NULL ? "" : text, PFI_FLEX_ALLOWED);
        return -1;
    }
    snprintf(flex, sizeof flex, "%s", text);
    times_given++;
    return 0;
}

static struct spank_option option = {
    "power-flex", "FLEX",
    "greatest loss of throughput this job allows while its GPUs are capped: none, low, medium, high, auto or 1%..100%",
    1, 0, read_option,
};

int slurm_spank_init(spank_t spank, int argc, char **argv)
{
    spank_context_t context = spank_context();

    (void)argc;
    (void)argv;
    /* sbatch and salloc (22.05) do not read a static table of options. slurmstepd must know the option as well. */
    if (is_submission() || context == S_CTX_REMOTE) {
        if (spank_option_register(spank, &option) != ESPANK_SUCCESS)
            slurm_error("--power-flex could not be registered");
    }
    return 0;
}

/* A job step inside an allocation: the allocation's flex stands. */
static bool is_step(void)
{
    return spank_context() == S_CTX_LOCAL && getenv("SLURM_JOB_ID") != NULL;
}

int slurm_spank_init_post_opt(spank_t spank, int argc, char **argv)
{
    const char *given = getenv(VARIABLE);

    (void)argc;
    (void)argv;
    if (!is_submission())
        return 0;
    if (is_step()) {
        if (times_given > (getenv(INHERITED) != NULL))
            slurm_info("--power-flex=%s has no effect on a step: the flex of its job stands", flex);
        return 0;
    }
    if (flex[0] == '\0' && given != NULL) {
        if (!pfi_flex_is_valid(given)) {
            /* Slurm goes on after an optional plugin's error, and this job must not be submitted. */
            slurm_error("%s=%.32s in the environment: not one of: %s", VARIABLE, given, PFI_FLEX_ALLOWED);
            exit(1);
        }
        snprintf(flex, sizeof flex, "%s", given);
    }
    if (flex[0] == '\0') {
        /* SLURM_SPANK_PFI_FLEX in the user's environment would otherwise travel to the node unchecked. */
        spank_job_control_unsetenv(spank, VARIABLE);
        return 0;
    }
    if (spank_job_control_setenv(spank, VARIABLE, flex, 1) != ESPANK_SUCCESS) {
        slurm_error("--power-flex=%s could not be stored with the job", flex);
        exit(1);
    }
    return 0;
}
