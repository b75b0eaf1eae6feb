#define _GNU_SOURCE
#include "state.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

static int open_in(const char *directory, const char *name, int flags)
{
    char path[4096];

    if (snprintf(path, sizeof path, "%s/%s", directory, name) >= (int)sizeof path) {
        errno = ENAMETOOLONG;
        return -1;
    }
    return open(path, flags | O_CLOEXEC | O_NOFOLLOW, 0666);
}

static struct node *node_map(int state_fd, int trace_fd)
{
    struct stat status;
    struct node *node = calloc(1, sizeof *node);

    if (node == NULL || fstat(state_fd, &status) != 0) {
        free(node);
        return NULL;
    }
    if ((size_t)status.st_size != sizeof(struct state)) { /* truncated, or made by another build */
        free(node);
        errno = EINVAL;
        return NULL;
    }
    node->state = mmap(NULL, sizeof(struct state), PROT_READ | PROT_WRITE, MAP_SHARED, state_fd, 0);
    if (node->state == MAP_FAILED) {
        free(node);
        return NULL;
    }
    node->trace_fd = trace_fd;
    node->owner = status.st_uid;
    node->may_control = geteuid() == 0 || geteuid() == status.st_uid;
    return node;
}

struct node *node_open(const char *directory)
{
    int state_fd = open_in(directory, "state", O_RDWR);
    int trace_fd = state_fd < 0 ? -1 : open_in(directory, "trace.jsonl", O_WRONLY | O_APPEND);
    struct node *node = trace_fd < 0 ? NULL : node_map(state_fd, trace_fd);

    if (node != NULL && (node->state->magic != PFI_MAGIC || node->state->size != sizeof(struct state))) {
        node_close(node);
        trace_fd = -1;
        node = NULL;
        errno = EINVAL;
    }
    int error = errno;
    if (state_fd >= 0)
        close(state_fd);
    if (node == NULL && trace_fd >= 0)
        close(trace_fd);
    errno = error;
    return node;
}

/* Both files must be new. The caller fills in the GPUs and then sets the magic, which makes the node usable. */
struct node *node_create(const char *directory)
{
    struct node *node = NULL;
    pthread_mutexattr_t attributes;
    int trace_fd = open_in(directory, "trace.jsonl", O_CREAT | O_EXCL | O_WRONLY | O_APPEND);
    int state_fd = trace_fd < 0 ? -1 : open_in(directory, "state", O_CREAT | O_EXCL | O_RDWR);

    if (state_fd >= 0 && fchmod(state_fd, 0666) == 0 && fchmod(trace_fd, 0666) == 0 &&
        ftruncate(state_fd, sizeof(struct state)) == 0)
        node = node_map(state_fd, trace_fd);
    int error = errno;
    if (state_fd >= 0)
        close(state_fd);
    if (node == NULL) {
        if (trace_fd >= 0)
            close(trace_fd);
        errno = error;
        return NULL;
    }
    pthread_mutexattr_init(&attributes);
    pthread_mutexattr_setpshared(&attributes, PTHREAD_PROCESS_SHARED);
    pthread_mutexattr_setrobust(&attributes, PTHREAD_MUTEX_ROBUST);
    pthread_mutex_init(&node->state->mutex, &attributes);
    pthread_mutexattr_destroy(&attributes);
    node->state->size = sizeof(struct state);
    return node;
}

void node_close(struct node *node)
{
    munmap(node->state, sizeof(struct state));
    close(node->trace_fd);
    free(node);
}

void node_lock(struct node *node)
{
    int result = pthread_mutex_lock(&node->state->mutex);

    /* The holder was killed. Every change ends by publishing a counter or a slot, so the state is usable as it is. */
    if (result == EOWNERDEAD)
        result = pthread_mutex_consistent(&node->state->mutex);
    if (result != 0) {
        fprintf(stderr, "nvml stand-in: cannot lock the state of the node: %s\n", strerror(result));
        abort();
    }
}

void node_unlock(struct node *node)
{
    pthread_mutex_unlock(&node->state->mutex);
}

int64_t monotonic_ns(void)
{
    struct timespec now;

    clock_gettime(CLOCK_MONOTONIC, &now);
    return (int64_t)now.tv_sec * NS_PER_S + now.tv_nsec;
}

int64_t node_now_ns(const struct node *node)
{
    return node->state->manual_ns != 0 ? node->state->manual_ns : monotonic_ns();
}
