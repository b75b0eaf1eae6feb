/* line_check STATE_DIR JOB_ID RESTART: prints the job's line, or ends with 1. For tests. */
#include "job_line.h"

#include <stdio.h>
#include <stdlib.h>

int main(int argc, char **argv)
{
    char line[PFI_LINE_BYTES];

    if (argc != 4 || !pfi_job_line(argv[1], (uint32_t)strtoul(argv[2], NULL, 10), argv[3], line))
        return 1;
    puts(line);
    return 0;
}
