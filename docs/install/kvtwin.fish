# Completion of kvtwin in fish: subcommands and options. All of it is read from
# `kvtwin help`.

function __kvtwin_subcommands
    echo help
    kvtwin help 2>/dev/null | sed -n '/^Subcommands:/,$s/^  \([a-z]\{1,\}\)  *\(.*\)/\1\t\2/p'
end

function __kvtwin_options
    set -l words (commandline -opc)
    kvtwin help $words[2] 2>/dev/null | grep -oE -- '^  (-h,)?--[a-z-]+' | sed 's/.*--/--/'
end

function __kvtwin_values
    set -l words (commandline -opc)
    kvtwin help $words[2] 2>/dev/null |
        sed -n "s/^  $words[-1] [^ ]*{\([^}]*\)}.*/\1/p" | tr , '\n'
end

function __kvtwin_wants_subcommand
    set -l words (commandline -opc)
    test (count $words) -eq 1; or test (count $words) -eq 2 -a "$words[2]" = help
end

complete -c kvtwin -n __kvtwin_wants_subcommand -f -a '(__kvtwin_subcommands)'
complete -c kvtwin -n 'not __kvtwin_wants_subcommand' -a '(__kvtwin_options)'
complete -c kvtwin -n 'not __kvtwin_wants_subcommand' -a '(__kvtwin_values)'
