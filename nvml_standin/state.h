/* The state of one simulated node: one file, mapped by every process that touches the node.
 *
 * The file is mode 0666: a user's training job must register its demand and count its work in it. Nothing but good
 * manners keeps such a job from writing a limit into the mapping. That is a limit of the simulation: through NVML,
 * and through the control functions, only root (or the owner of the file) sets a limit, as on real hardware.
 *
 * Between two events (a limit that comes into force, a demand that comes or goes) every quantity has a closed form,
 * so a reader only evaluates; no thread advances anything. All times are CLOCK_MONOTONIC nanoseconds. */
#ifndef PFI_STATE_H
#define PFI_STATE_H

#include <pthread.h>
#include <stdbool.h>
#include <stdint.h>
#include <sys/types.h>

#include "physics.h"

#define PFI_EXPORT __attribute__((visibility("default")))

enum {
    MAX_GPUS = 16,
    MAX_CLIENTS = 256,
    MAX_SLICES = 7,
    MAX_FAULTS = 64,
    MAX_INSIDE = 16,
    MAX_EVENTS = 64,
    MAX_PENDING = 8,
    MAX_DEMANDS = 4,
    MAX_SEGMENTS = 64,
    UUID_LEN = 48,
    PCI_LEN = 32,
    NAME_LEN = 96,
    JOB_LEN = 64,
    FUNCTION_LEN = 64,
};

#define PFI_MAGIC UINT64_C(0x32304f4e56504649)
#define NS_PER_S INT64_C(1000000000)

/* A pid alone is reused by the kernel; with its start time it names one process. */
struct process {
    int32_t pid; /* 0: none */
    uint64_t start_ticks;
};

struct client {
    struct process process;
    uint32_t references;
};

/* What a process does on a GPU, as a CUDA context would show it. */
struct demand {
    struct process process;
    struct workload workload;
    uint64_t serial; /* the latest registered sets draw and clock */
    char job[JOB_LEN];
};

struct pending_limit {
    int64_t due_ns;
    uint32_t requested_mw;
    int32_t pid;
};

/* What accumulates while a GPU runs. WORK is in seconds at the uncapped speed of the job; the others in busy seconds. */
enum counter { WORK, SM_ACTIVE, TENSOR_ACTIVE, DRAM_ACTIVE, COPY_ACTIVE, N_COUNTERS };

/* A stretch of time without events. Draw relaxes from draw_w towards target_w with the time constant tau_s. */
struct segment {
    int64_t start_ns;
    double draw_w;
    double target_w;
    double tau_s;
    double energy_j;
    double clock; /* SM clock as a share of the greatest */
    bool power_capped;
    double counter[N_COUNTERS];
    double rate[N_COUNTERS];
};

/* How the power sensor differs from a perfect one. */
struct sensor {
    uint32_t step_mw;        /* readings are multiples of it, 0 or 1: exact */
    uint32_t period_ms;      /* a new reading this often, 0: at any time */
    uint32_t window_ms;      /* the last part of each period that a reading covers */
    double energy_offset_mj; /* added to the energy counter */
};

enum pids_shown {
    PIDS_TRUE = 0,
    PIDS_ZERO = 1,    /* the driver cannot name them */
    PIDS_FOREIGN = 2, /* numbers of another namespace: no process here has them */
};

struct gpu {
    char uuid[UUID_LEN];
    char pci[PCI_LEN];
    uint32_t minor;
    uint32_t min_mw, max_mw, default_mw;
    uint32_t reference_mw;   /* T_max and P_max are those at this limit: the default when the node was made */
    uint32_t requested_mw;   /* what the last caller asked for */
    uint32_t in_force_mw;    /* the requested limit that is in force by now */
    uint32_t effective_mw;   /* the lowest of in_force_mw, bmc_mw and what the module's limit leaves */
    uint32_t bmc_mw;         /* out-of-band limit, 0: none */
    uint32_t module_mw;      /* limit of the whole module, 0: a board without module scope */
    uint32_t module_rest_mw; /* what the rest of the module draws */
    uint32_t granularity_mw; /* a set is rounded down to a multiple */
    uint32_t effect_us;      /* from a set until it is in force */
    uint32_t tau_ms;
    double idle_w;
    double clock_limit; /* share of the greatest clock; below 1 for a thermal or power-brake slowdown */
    double clock_floor; /* share of the greatest clock that no limit goes below */
    uint32_t slowdown;  /* clocks event reasons of a slowdown; 0: software thermal when clock_limit is below 1 */
    struct sensor sensor;
    int32_t persistence;
    int32_t sticky_code; /* an nvmlReturn_t that every call on this GPU answers, 0: none */
    int32_t hidden;      /* fell off without a word: not counted, not listed */
    int32_t mig;         /* slices, 0: off */
    uint32_t generation; /* counts the boards that were in this slot */
    int32_t pids;        /* enum pids_shown */
    int32_t resident_pid; /* a process that only holds memory, 0: none */
    int32_t no_gpm;
    int32_t gpm_window_ms; /* samples that are closer make no metric */
    int32_t gpm_zeroes;    /* what such samples make: zeroes, or an error */
    uint32_t orphan_hang_ms; /* how long calls hang after a client was killed inside one, 0: not at all */
    int64_t wedged_until_ns; /* CLOCK_MONOTONIC */
    struct process inside[MAX_INSIDE]; /* who sleeps in a call, kept while orphan_hang_ms is set */
    uint32_t n_pending;
    struct pending_limit pending[MAX_PENDING];
    struct demand demand[MAX_DEMANDS];
    uint64_t n_segments; /* ever made; the ring holds the last MAX_SEGMENTS */
    struct segment segment[MAX_SEGMENTS];
};

enum fault_kind {
    FAULT_CODE = 0,    /* answer `code`, do nothing */
    FAULT_SILENT = 1,  /* answer success, do nothing (setters) */
    FAULT_APPLIED = 2, /* do it, then answer `code`, late by delay_us */
    FAULT_DELAY = 3,   /* sleep, then do it */
    FAULT_CRASH = 4,   /* SIGSEGV inside the call */
    FAULT_VALUE = 5,   /* answer success with `value` (getters of one number, and fields) */
    FAULT_ENTRY = 6,   /* a field of a nvmlDeviceGetFieldValues that succeeds has `code` */
    FAULT_HANG = 7,    /* sleep until the fault is cleared, at most delay_us if that is set; then do it */
};

struct fault {
    char function[FUNCTION_LEN]; /* C symbol, "*": any; empty: slot free */
    int32_t gpu;                 /* slot, -1: any */
    int32_t kind;
    int32_t code;
    int32_t after; /* matching calls still to let through */
    int32_t count; /* times still to fire, -1: for ever */
    int32_t field; /* FAULT_VALUE and FAULT_ENTRY: a field id, 0: every field */
    int64_t delay_us;
    double value;
    uint64_t serial; /* tells it from a later one in the same slot */
};

/* What nvmlEventSetWait hands out. */
struct event {
    int32_t gpu;
    uint64_t type, data;
};

struct state {
    uint64_t magic;
    uint64_t size;
    pthread_mutex_t mutex;
    uint32_t n_gpus;
    int32_t init_code;  /* what nvmlInit answers, 0: works */
    int64_t manual_ns;  /* a clock that only tests turn, 0: CLOCK_MONOTONIC */
    int64_t swept_ns;   /* when dead processes were last looked for */
    uint32_t rotation;  /* by how much the NVML order is turned for who initialises from now on */
    uint64_t serial;
    char driver[NAME_LEN];
    char model[NAME_LEN];
    struct client client[MAX_CLIENTS];
    struct fault fault[MAX_FAULTS];
    int64_t faults_fired; /* since they were last cleared */
    uint64_t n_events; /* ever posted; the ring holds the last MAX_EVENTS */
    struct event event[MAX_EVENTS];
    struct gpu gpu[MAX_GPUS];
};

struct node {
    struct state *state;
    int trace_fd;
    uid_t owner;      /* of the state file: who made this node */
    bool may_control; /* the caller owns the state file, or is root */
};

/* state.c: returns NULL and sets errno. */
struct node *node_open(const char *directory);
struct node *node_create(const char *directory);
void node_close(struct node *node);
void node_lock(struct node *node);
void node_unlock(struct node *node);
int64_t node_now_ns(const struct node *node);
int64_t monotonic_ns(void);

/* process.c */
struct process process_self(void);
bool process_alive(struct process process);

#endif
