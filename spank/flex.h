/* Reading what a user allows: the value of --power-flex. */
#ifndef SLURM_PFI_FLEX_H
#define SLURM_PFI_FLEX_H

#include <stdbool.h>

#define PFI_FLEX_ALLOWED "none, low, medium, high, auto or a whole percentage from 1% to 100%"

/* True for exactly the texts that slurm_pfi.flex.parse_flex reads: lower case, no white space, sign or leading zero. */
bool pfi_flex_is_valid(const char *text);

#endif
