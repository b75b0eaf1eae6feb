/* Who is initialised, and what a device handle leads to. */
#define _GNU_SOURCE
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "call.h"

static pthread_mutex_t session_mutex = PTHREAD_MUTEX_INITIALIZER;
static struct node *session_node;
static unsigned session_references;
static pid_t session_pid;
static unsigned rotation;
static uint32_t generations[MAX_GPUS]; /* of the boards that were there at initialisation */

/* A handle is the address of its place here: first the device as a whole, then its slices. */
static char handles[MAX_GPUS][1 + MAX_SLICES];

struct node *current_node(void)
{
    return session_references > 0 && session_pid == getpid() ? session_node : NULL;
}

unsigned session_rotation(void)
{
    return rotation;
}

bool may_set(const struct node *node)
{
    const char *pretended = getenv("PFI_STANDIN_EUID");

    /* Whoever made the simulated node is its root, so that a user without root can simulate too. The variable can
       only take rights away. */
    return (geteuid() == 0 || geteuid() == node->owner) && (pretended == NULL || strcmp(pretended, "0") == 0);
}

nvmlDevice_t handle_of(const struct node *node, const struct gpu *gpu, int slice)
{
    return (nvmlDevice_t)&handles[gpu - node->state->gpu][1 + slice];
}

nvmlReturn_t handle_find(struct node *node, nvmlDevice_t device, struct gpu **gpu, int *slice)
{
    const char *handle = (const char *)device;
    long place = handle - handles[0];

    if (handle < handles[0] || handle >= handles[node->state->n_gpus])
        return NVML_ERROR_INVALID_ARGUMENT;
    *gpu = &node->state->gpu[place / (1 + MAX_SLICES)];
    *slice = (int)(place % (1 + MAX_SLICES)) - 1;
    if ((*gpu)->generation != generations[place / (1 + MAX_SLICES)])
        return NVML_ERROR_GPU_IS_LOST;
    return *slice < (*gpu)->mig ? NVML_SUCCESS : NVML_ERROR_INVALID_ARGUMENT;
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

/* The order and the boards stay as they were at the first initialisation, as a driver enumerates once. */
static void look_around(const struct state *state)
{
    rotation = state->rotation;
    for (uint32_t i = 0; i < state->n_gpus; i++)
        generations[i] = state->gpu[i].generation;
}

static nvmlReturn_t join(struct node *node)
{
    struct call call = {.node = node, .slice = BOARD};
    struct process self = process_self();
    struct client *client;
    nvmlReturn_t code;

    node_lock(node);
    code = call_meet_faults(&call, "nvmlInit_v2");
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
            if (session_references == 0)
                look_around(node->state);
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
