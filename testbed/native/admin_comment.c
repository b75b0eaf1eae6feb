/*
 * Tries to set a job's AdminComment through the libraries that Slurm's own commands are made of, as whoever runs it:
 *
 *     admin_comment submit|submit-as-root|allocate|will-run|het|cron TEXT
 *     admin_comment cron-end
 *     admin_comment update|kill JOB TEXT
 *     admin_comment accounting|accounting-quote JOB TEXT
 *
 * TEXT "-" sets none: then the same request is an ordinary one. Prints "taken", with the job id where there is a new
 * one, or "refused" and why; the exit code is 0, 1, or 2 where this release of Slurm has no such request.
 */
#include <errno.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <slurm/slurm.h>
#include <slurm/slurm_errno.h>
#include <slurm/slurmdb.h>

/* Exported by libslurm, and declared only in its internal headers. */
extern void *slurm_bit_alloc(int64_t bits);
extern void slurm_bit_set_all(void *bits);
extern int slurm_addto_step_list(void *steps, char *names);

/* What job_desc_msg_t's crontab_entry points to: its layout is internal too, and the same from 22.05 to 26.05. */
struct cron_entry {
    uint32_t flags;
    void *minute, *hour, *day_of_month, *month, *day_of_week;
    char *cronspec, *command;
    uint32_t line_start, line_end;
};

#if SLURM_VERSION_NUMBER >= SLURM_VERSION_NUM(25, 11, 0)
#define JOB_ID(response) ((response)->step_id.job_id)
#else
#define JOB_ID(response) ((response)->job_id)
#endif

#define NO_USER 99 /* SLURM_AUTH_NOBODY: jobs of any user */

static char script[] = "#!/bin/sh\nexec sleep 300\n";
static char folder[] = "/tmp";
static char path[] = "PATH=/usr/bin:/bin";
static char *environment[] = {path, NULL};

static int answer(int failed, uint32_t job_id)
{
    if (failed) {
        printf("refused %s\n", slurm_strerror(failed < 0 ? errno : failed));
        return 1;
    }
    printf("taken %u\n", (unsigned)job_id);
    return 0;
}

static void describe(job_desc_msg_t *job, char *text)
{
    slurm_init_job_desc_msg(job);
    job->admin_comment = text;
    job->argc = 0;
    job->env_size = 1;
    job->environment = environment;
    job->group_id = getgid();
    job->min_cpus = 1;
    job->min_nodes = 1;
    job->name = "admin_comment";
    job->script = script;
    job->std_out = "/dev/null";
    job->user_id = getuid();
    job->work_dir = folder;
}

static int submit(char *text, int as_root)
{
    job_desc_msg_t job;
    submit_response_msg_t *response = NULL;

    describe(&job, text);
    if (as_root) {
        job.user_id = 0;
        job.group_id = 0;
    }
    int failed = slurm_submit_batch_job(&job, &response);
    return answer(failed, response == NULL ? 0 : JOB_ID(response));
}

static int allocate(char *text)
{
    job_desc_msg_t job;
    resource_allocation_response_msg_t *response = NULL;

    describe(&job, text);
    job.script = NULL;
    int failed = slurm_allocate_resources(&job, &response);
    return answer(failed, response == NULL ? 0 : JOB_ID(response));
}

/* Makes no job. */
static int will_run(char *text)
{
    job_desc_msg_t job;
    will_run_response_msg_t *response = NULL;

    describe(&job, text);
    job.script = NULL;
    return answer(slurm_job_will_run2(&job, &response), 0);
}

static int het(char *text)
{
    job_desc_msg_t first, second;
    submit_response_msg_t *response = NULL;

    describe(&first, NULL);
    describe(&second, text); /* the second: that the first alone is looked at would be a door */
    second.script = NULL;
    first.het_job_offset = 0;
    second.het_job_offset = 1;
    void *jobs = slurm_list_create(NULL);
    slurm_list_append(jobs, &first);
    slurm_list_append(jobs, &second);
    int failed = slurm_submit_batch_het_job(jobs, &response);
    return answer(failed, response == NULL ? 0 : JOB_ID(response));
}

static void *every(int64_t bits)
{
    void *all = slurm_bit_alloc(bits);
    slurm_bit_set_all(all);
    return all;
}

static int cron(char *text)
{
    job_desc_msg_t job;
    struct cron_entry entry;

    describe(&job, text);
    memset(&entry, 0, sizeof(entry));
    entry.minute = every(61);
    entry.hour = every(25);
    entry.day_of_month = every(32);
    entry.month = every(13);
    entry.day_of_week = every(8);
    job.bitflags |= CRON_JOB;
    job.crontab_entry = &entry;
    void *jobs = slurm_list_create(NULL);
    slurm_list_append(jobs, &job);
    crontab_update_response_msg_t *response = slurm_update_crontab(getuid(), getgid(), "* * * * * true\n", jobs);
    if (response == NULL) {
        return answer(-1, 0);
    }
    return answer((int)response->return_code, response->jobids_count > 0 ? response->jobids[0] : 0);
}

static int update(char *job_id, char *text)
{
    job_desc_msg_t change;
    job_array_resp_msg_t *responses = NULL;

    slurm_init_job_desc_msg(&change);
    change.job_id_str = job_id;
    change.admin_comment = text;
    int failed = slurm_update_job2(&change, &responses);
    for (uint32_t i = 0; !failed && responses != NULL && i < responses->job_array_count; i++) {
        failed = (int)responses->error_code[i];
    }
    return answer(failed, 0);
}

static int kill_job(char *job_id, char *text)
{
#if SLURM_VERSION_NUMBER >= SLURM_VERSION_NUM(25, 11, 0)
    kill_jobs_msg_t message;
    kill_jobs_resp_msg_t *responses = NULL;
    char *jobs[] = {job_id};

    memset(&message, 0, sizeof(message));
    message.admin_comment = text;
    message.jobs_array = jobs;
    message.jobs_cnt = 1;
    message.signal = 10; /* SIGUSR1: the job goes on */
    message.state = JOB_END; /* jobs in any state */
    message.user_id = NO_USER;
    return answer(slurm_kill_jobs(&message, &responses), 0);
#else
    (void)job_id;
    (void)text;
    return 2;
#endif
}

/* "quote": by the text that users may set themselves, ended by a quote as if it were SQL. */
static int accounting(char *job_id, char *text, int quote)
{
    uint16_t flags = 0;
    slurmdb_job_cond_t which;
    slurmdb_job_rec_t change;
    char ended[1024];

    memset(&which, 0, sizeof(which));
    which.db_flags = SLURMDB_JOB_FLAG_NOTSET;
    which.flags = JOBCOND_FLAG_NO_DEFAULT_USAGE;
    which.step_list = slurm_list_create(NULL);
    slurm_addto_step_list(which.step_list, job_id);
    memset(&change, 0, sizeof(change));
    change.derived_ec = NO_VAL;
    if (quote) {
        snprintf(ended, sizeof(ended), "x', admin_comment='%s", text);
        change.derived_es = ended;
    } else {
        change.admin_comment = text;
    }
    void *connection = slurmdb_connection_get(&flags);
    void *changed = slurmdb_job_modify(connection, &which, &change);
    if (changed == NULL) {
        return answer(-1, 0);
    }
    return answer(slurmdb_connection_commit(connection, 1), 0);
}

int main(int argc, char **argv)
{
    const char *door = argc > 1 ? argv[1] : "";
    char *text = argc > 2 && strcmp(argv[argc - 1], "-") != 0 ? argv[argc - 1] : NULL;

    slurm_init(NULL);
    if (argc == 2 && strcmp(door, "cron-end") == 0) return answer(slurm_remove_crontab(getuid(), getgid()), 0);
    if (argc == 3) {
        if (strcmp(door, "submit") == 0) return submit(text, 0);
        if (strcmp(door, "submit-as-root") == 0) return submit(text, 1);
        if (strcmp(door, "allocate") == 0) return allocate(text);
        if (strcmp(door, "will-run") == 0) return will_run(text);
        if (strcmp(door, "het") == 0) return het(text);
        if (strcmp(door, "cron") == 0) return cron(text);
    } else if (argc == 4) {
        if (strcmp(door, "update") == 0) return update(argv[2], text);
        if (strcmp(door, "kill") == 0) return kill_job(argv[2], text);
        if (strcmp(door, "accounting") == 0) return accounting(argv[2], text, 0);
        if (strcmp(door, "accounting-quote") == 0) return accounting(argv[2], text, 1);
    }
    fprintf(stderr, "admin_comment: no such request: %s\n", door);
    return 64;
}
