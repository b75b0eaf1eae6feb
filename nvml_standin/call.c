#define _GNU_SOURCE
#include "call.h"

#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "fault.h"

static pthread_mutex_t session_mutex = PTHREAD_MUTEX_INITIALIZER;
static struct node *session_node;
static unsigned session_references;
static pid_t session_pid;
static char handles[MAX_GPUS]; /* a device handle is the address of its slot here */

struct node *current_node(void)
{
    return session_references > 0 && session_pid == getpid() ? session_node : NULL;
}

nvmlDevice_t device_of(const struct node *node, const struct gpu *gpu)
{
    return (nvmlDevice_t)&handles[gpu - node->state->gpu];
}

bool may_set(const struct node *node)
{
    const char *pretended = getenv("PFI_STANDIN_EUID");

    /* Whoever made the simulated node is its root, so that a user without root can simulate too. The variable can
       only take rights away. */
    return (geteuid() == 0 || geteuid() == node->owner) && (pretended == NULL || strcmp(pretended, "0") == 0);
}

nvmlReturn_t copy_text(char *buffer, unsigned int length, const char *text)
{
    if (buffer == NULL)
        return NVML_ERROR_INVALID_ARGUMENT;
    if (strlen(text) + 1 > length)
        return NVML_ERROR_INSUFFICIENT_SIZE;
    strcpy(buffer, text);
    return NVML_SUCCESS;
}

/* Meet planted faults with the lock held. On a delay the lock is let go, so that only this caller hangs. */
static nvmlReturn_t meet_fault(struct call *call, const char *function)
{
    int slot = call->gpu == NULL ? -1 : (int)(call->gpu - call->node->state->gpu);
    struct fault fault = fault_take(call->node->state, function, slot);

    switch (fault.kind) {
    case FAULT_CODE:
        return (nvmlReturn_t)fault.code;
    case FAULT_SILENT:
        call->silent = true;
        break;
    case FAULT_APPLIED:
        call->after_code = (nvmlReturn_t)fault.code;
        break;
    case FAULT_DELAY:
        node_unlock(call->node);
        usleep((useconds_t)fault.delay_us);
        node_lock(call->node);
        break;
    default:
        break;
    }
    return NVML_SUCCESS;
}

static nvmlReturn_t begin(struct call *call, const char *function)
{
    nvmlReturn_t code;

    node_lock(call->node);
    code = meet_fault(call, function);
    if (code == NVML_SUCCESS && call->gpu != NULL && call->gpu->hidden)
        code = NVML_ERROR_GPU_IS_LOST;
    if (code == NVML_SUCCESS && call->gpu != NULL && call->gpu->sticky_code != 0)
        code = (nvmlReturn_t)call->gpu->sticky_code;
    if (code != NVML_SUCCESS) {
        node_unlock(call->node);
        return code;
    }
    call->now_ns = node_now_ns(call->node);
    node_sweep_sometimes(call->node, call->now_ns);
    if (call->gpu != NULL)
        gpu_advance(call->node, call->gpu, call->now_ns);
    return NVML_SUCCESS;
}

nvmlReturn_t call_begin(struct call *call, const char *function, nvmlDevice_t device)
{
    const char *handle = (const char *)device;

    *call = (struct call){.node = current_node()};
    if (call->node == NULL)
        return NVML_ERROR_UNINITIALIZED;
    if (handle < handles || handle >= handles + call->node->state->n_gpus)
        return NVML_ERROR_INVALID_ARGUMENT;
    call->gpu = &call->node->state->gpu[handle - handles];
    return begin(call, function);
}

nvmlReturn_t call_begin_system(struct call *call, const char *function)
{
    *call = (struct call){.node = current_node()};
    return call->node == NULL ? NVML_ERROR_UNINITIALIZED : begin(call, function);
}

nvmlReturn_t call_end(struct call *call, nvmlReturn_t code)
{
    node_unlock(call->node);
    return code == NVML_SUCCESS ? call->after_code : code;
}

static struct client *own_client(struct state *state, struct process self)
{
    struct client *empty = NULL;

    for (int i = 0; i < MAX_CLIENTS; i++) {
        struct client *client = &state->client[i];
        if (client->process.pid == self.pid && client->process.start_ticks == self.start_ticks)
            return client;
        if (client->process.pid == 0 && empty == NULL)
            empty = client;
    }
    return empty;
}

static nvmlReturn_t join(struct node *node)
{
    struct call call = {.node = node};
    struct process self = process_self();
    struct client *client;
    nvmlReturn_t code;

    node_lock(node);
    code = meet_fault(&call, "nvmlInit_v2");
    if (code == NVML_SUCCESS && node->state->init_code != 0)
        code = (nvmlReturn_t)node->state->init_code;
    if (code == NVML_SUCCESS) {
        /* First the dead: if the last client died with persistence off, its limits died with it. */
        node_sweep(node, node_now_ns(node));
        client = own_client(node->state, self);
        if (client == NULL) {
            code = NVML_ERROR_INSUFFICIENT_RESOURCES;
        } else {
            client->process = self;
            client->references++;
        }
    }
    node_unlock(node);
    return code == NVML_SUCCESS ? call.after_code : code;
}

static nvmlReturn_t initialise(void)
{
    const char *directory = getenv("PFI_STANDIN_DIR");
    nvmlReturn_t code;

    pthread_mutex_lock(&session_mutex);
    if (session_pid != getpid())
        session_references = 0; /* a forked child starts anew */
    if (session_references == 0) {
        if (session_node != NULL)
            node_close(session_node);
        session_node = directory == NULL ? NULL : node_open(directory);
        session_pid = getpid();
    }
    if (session_node == NULL) {
        code = NVML_ERROR_DRIVER_NOT_LOADED;
    } else {
        code = join(session_node);
        if (code == NVML_SUCCESS)
            session_references++;
    }
    pthread_mutex_unlock(&session_mutex);
    return code;
}

nvmlReturn_t nvmlInit_v2(void)
{
    return initialise();
}

nvmlReturn_t nvmlInitWithFlags(unsigned int flags)
{
    (void)flags;
    return initialise();
}

nvmlReturn_t nvmlShutdown(void)
{
    struct node *node;
    struct client *client;

    pthread_mutex_lock(&session_mutex);
    node = current_node();
    if (node == NULL) {
        pthread_mutex_unlock(&session_mutex);
        return NVML_ERROR_UNINITIALIZED;
    }
    session_references--; /* the mapping stays until the next first init: another thread may still be inside */
    node_lock(node);
    client = own_client(node->state, process_self());
    if (client != NULL && client->references > 0 && --client->references == 0)
        *client = (struct client){0};
    node_sweep(node, node_now_ns(node));
    node_unlock(node);
    pthread_mutex_unlock(&session_mutex);
    return NVML_SUCCESS;
}
