#define _GNU_SOURCE
#include "fault.h"

#include <string.h>

struct fault fault_take(struct state *state, const char *function, int gpu)
{
    for (int i = 0; i < MAX_FAULTS; i++) {
        struct fault *fault = &state->fault[i];
        bool named = strcmp(fault->function, function) == 0 || strcmp(fault->function, "*") == 0;

        if (fault->function[0] == '\0' || !named || (fault->gpu != -1 && fault->gpu != gpu) || fault->count == 0)
            continue;
        if (fault->after > 0) {
            fault->after--;
            continue;
        }
        if (fault->count > 0)
            fault->count--;
        fault->fired++;
        return *fault;
    }
    return (struct fault){.kind = -1};
}
