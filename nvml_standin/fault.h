/* Faults that a test plants: which function, on which GPU, how often, and what goes wrong. */
#ifndef PFI_FAULT_H
#define PFI_FAULT_H

#include "state.h"

/* Find, count and copy the fault that this call meets; kind -1: none. Wants the node's lock held. */
struct fault fault_take(struct state *state, const char *function, int gpu);

#endif
