#define _GNU_SOURCE
#include <inttypes.h>
#include <stdio.h>
#include <unistd.h>

#include "gpu.h"

/* One write per line on an O_APPEND file: lines of several processes never mix. */
static void append(const struct node *node, const char *line, int length)
{
    ssize_t written = write(node->trace_fd, line, (size_t)length);

    if (written != length)
        fprintf(stderr, "nvml stand-in: cannot append to the trace: is the disk full?\n");
}

void trace_limit(const struct node *node, const struct gpu *gpu, int64_t at_ns, int32_t pid)
{
    char line[256];
    int length = snprintf(line, sizeof line,
                          "{\"mono_ns\": %" PRId64 ", \"event\": \"limit\", \"uuid\": \"%s\", "
                          "\"effective_mw\": %" PRIu32 ", \"requested_mw\": %" PRIu32 ", \"pid\": %" PRId32 "}\n",
                          at_ns, gpu->uuid, gpu->effective_mw, gpu->in_force_mw, pid);
    append(node, line, length);
}

void trace_kernel(const struct node *node, const struct gpu *gpu, int64_t at_ns, int32_t pid, const char *job)
{
    char line[256];
    int length = snprintf(line, sizeof line,
                          "{\"mono_ns\": %" PRId64 ", \"event\": \"kernel\", \"uuid\": \"%s\", "
                          "\"effective_mw\": %" PRIu32 ", \"pid\": %" PRId32 ", \"job\": \"%s\"}\n",
                          at_ns, gpu->uuid, gpu->effective_mw, pid, job);
    append(node, line, length);
}
