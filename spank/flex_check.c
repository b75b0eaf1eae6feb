/* flex_check: reads NUL-terminated values from stdin, writes "good" or "bad" for each, a line each. For tests. */
#include "flex.h"

#include <stdio.h>
#include <stdlib.h>

int main(void)
{
    char *value = NULL;
    size_t room = 0;

    while (getdelim(&value, &room, '\0', stdin) > 0)
        puts(pfi_flex_is_valid(value) ? "good" : "bad");
    free(value);
    return 0;
}
