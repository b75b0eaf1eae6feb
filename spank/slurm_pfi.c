/*
 * slurm_pfi.so: the option --power-flex of sbatch, srun and salloc.
 *
 * The value is checked where the job is submitted and travels as SPANK_PFI_FLEX to the hooks of the node. Without the
 * option the environment variable PFI_FLEX counts. On the node this plugin does one thing, where plugstack.conf says
 * job_line=DIR: a batch job that ends says in its own output what caps cost it (job_line.c). It fails nothing there.
 * Line for plugstack.conf: etc/plugstack.conf. `optional` there, so that a missing plugin stops no job.
 */
#include "flex.h"
#include "job_line.h"

#include <slurm/slurm.h>
#include <slurm/spank.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

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

/* The folder of the agent's state, where the site has switched the job's last line on; else NULL. */
static const char *line_folder(int argc, char **argv)
{
    for (int i = 0; i < argc; i++)
        if (strncmp(argv[i], "job_line=/", 10) == 0)
            return argv[i] + 9;
    return NULL;
}

/*
 * The batch script has ended; slurmstepd is root and still holds the job's stderr, to which its own messages go. So no
 * path of a user is opened, and the line comes where "slurmstepd: error: *** JOB 1 CANCELLED" would.
 */
int slurm_spank_task_exit(spank_t spank, int argc, char **argv)
{
    const char *folder = line_folder(argc, argv);
    char restart[16] = "0";
    char line[PFI_LINE_BYTES];
    uint32_t job_id, step_id;

    if (folder == NULL || spank_context() != S_CTX_REMOTE)
        return 0;
    if (spank_get_item(spank, S_JOB_ID, &job_id) != ESPANK_SUCCESS ||
        spank_get_item(spank, S_JOB_STEPID, &step_id) != ESPANK_SUCCESS || step_id != SLURM_BATCH_SCRIPT)
        return 0;
    /* The job's own word; a wrong one names a file that is not there, or that of another run of this job. */
    if (spank_getenv(spank, "SLURM_RESTART_COUNT", restart, sizeof restart) != ESPANK_SUCCESS)
        snprintf(restart, sizeof restart, "0");
    if (pfi_job_line(folder, job_id, restart, line))
        slurm_spank_log("slurm-pfi: %s", line);
    return 0;
}
