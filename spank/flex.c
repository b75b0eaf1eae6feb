/* The same words are read by the prolog (sh) and by slurm_pfi.flex; tests/data/flex_corpus.tsv holds all three to it. */
#include "flex.h"

#include <stddef.h>
#include <string.h>

static bool is_whole_percentage(const char *text)
{
    /* "1%" .. "100%"; isdigit() would ask the locale. */
    size_t digits = strspn(text, "0123456789");

    if (digits < 1 || digits > 3 || text[0] == '0' || strcmp(text + digits, "%") != 0)
        return false;
    return digits < 3 || strcmp(text, "100%") == 0;
}

bool pfi_flex_is_valid(const char *text)
{
    static const char *const words[] = {"none", "low", "medium", "high", "auto"};

    for (size_t i = 0; i < sizeof words / sizeof words[0]; i++)
        if (strcmp(text, words[i]) == 0)
            return true;
    return is_whole_percentage(text);
}
