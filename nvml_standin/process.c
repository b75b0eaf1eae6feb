#define _GNU_SOURCE
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "state.h"

/* Fields 3 (state) and 22 (start time) of /proc/<pid>/stat; start 0 when there is no such process. */
static uint64_t start_ticks(int32_t pid, char *process_state)
{
    char path[32], text[1024];
    int fd;
    ssize_t length;

    snprintf(path, sizeof path, "/proc/%d/stat", pid);
    fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0)
        return 0;
    length = read(fd, text, sizeof text - 1);
    close(fd);
    if (length <= 0)
        return 0;
    text[length] = '\0';

    char *field = strrchr(text, ')'); /* the command before it may hold anything */
    if (field == NULL || field[1] != ' ')
        return 0;
    field += 2;
    *process_state = *field;
    for (int number = 3; number < 22; number++) {
        field = strchr(field, ' ');
        if (field == NULL)
            return 0;
        field++;
    }
    return strtoull(field, NULL, 10);
}

struct process process_self(void)
{
    char ignored = '?';
    struct process self = {.pid = getpid()};

    self.start_ticks = start_ticks(self.pid, &ignored);
    return self;
}

bool process_alive(struct process process)
{
    char process_state = '?';
    uint64_t start = start_ticks(process.pid, &process_state);

    return start != 0 && start == process.start_ticks && process_state != 'Z' && process_state != 'X';
}
