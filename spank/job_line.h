/* What a job says of itself at its end: a line that the node agent keeps ready. */
#ifndef SLURM_PFI_JOB_LINE_H
#define SLURM_PFI_JOB_LINE_H

#include <stdbool.h>
#include <stdint.h>

#define PFI_LINE_BYTES 301

/*
 * Reads STATE_DIR/NODE/lines/JOB_ID.RESTART, of whichever node has it, into line. False where there is none, or it is
 * no regular file of ours (root, or who we run as), or not one line of printable ASCII. Waits for nothing.
 */
bool pfi_job_line(const char *state_dir, uint32_t job_id, const char *restart, char line[PFI_LINE_BYTES]);

#endif
