/* Faults that a test plants: which function, on which GPU, how often, and what goes wrong. */
#ifndef PFI_FAULT_H
#define PFI_FAULT_H

#include "state.h"

/* Find and count the next fault from slot *from on that a call meets, and step *from behind it; NULL: none.
 * Wants the node's lock held. */
const struct fault *fault_take(struct state *state, const char *function, int gpu, int *from);

/* The rest: the lock held, let go while they sleep, so that only this caller hangs. `gpu` may be NULL. */
void fault_delay(struct node *node, struct gpu *gpu, int64_t delay_us);
void fault_hang(struct node *node, struct gpu *gpu, const struct fault *fault);

/* Sleep for as long as the GPU answers nobody because a client was killed inside a call. */
void fault_wait_wedged(struct node *node, struct gpu *gpu);

_Noreturn void fault_crash(struct node *node);

#endif
