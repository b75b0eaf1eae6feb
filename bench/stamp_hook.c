/* Stands in slurmd's configuration for a hook, runs the real one, and records how long that took: for bench.hook_times.

   The program lies at FOLDER/NAME (prolog or epilog), runs FOLDER/NAME.hook in the environment that slurmd gave, and
   appends to FOLDER/stamps by one write: NAME, node, job id, begin and end in CLOCK_MONOTONIC ns, exit status. */
#define _GNU_SOURCE
#include <fcntl.h>
#include <inttypes.h>
#include <libgen.h>
#include <limits.h>
#include <spawn.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

extern char **environ;

static int64_t now_ns(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * INT64_C(1000000000) + now.tv_nsec;
}

static const char *given(const char *name)
{
    const char *value = getenv(name);
    return value != NULL && *value != '\0' ? value : "-";
}

int main(void)
{
    char self[PATH_MAX], copy[PATH_MAX], hook[PATH_MAX + 8], stamps[PATH_MAX + 8], line[512];
    ssize_t length = readlink("/proc/self/exe", self, sizeof self - 1);
    if (length <= 0)
        return 1;
    self[length] = '\0';
    snprintf(copy, sizeof copy, "%s", self);
    snprintf(hook, sizeof hook, "%s.hook", self);
    snprintf(stamps, sizeof stamps, "%s/stamps", dirname(copy));

    char *arguments[] = {hook, NULL};
    int status = 0;
    pid_t child = 0;
    int64_t begin_ns = now_ns();
    if (posix_spawn(&child, hook, NULL, NULL, arguments, environ) != 0 || waitpid(child, &status, 0) != child)
        return 1;
    int64_t end_ns = now_ns();

    int said = snprintf(line, sizeof line, "%s %s %s %" PRId64 " %" PRId64 " %d\n", basename(self),
                        given("SLURMD_NODENAME"), given("SLURM_JOB_ID"), begin_ns, end_ns, status);
    int file = open(stamps, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0644);
    if (file < 0 || write(file, line, (size_t)said) != said)
        return 1;
    return WIFEXITED(status) ? WEXITSTATUS(status) : 1;
}
