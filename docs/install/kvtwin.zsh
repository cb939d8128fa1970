#compdef kvtwin
# Completion of kvtwin in zsh: subcommands, options, and the values that the help of
# an option lists. All of it is read from `kvtwin help`.

local help before=${words[CURRENT-1]}
local -a found
if (( CURRENT == 2 )) || [[ CURRENT -eq 3 && $before == help ]]; then
  found=(help ${(f)"$(kvtwin help 2>/dev/null |
    sed -n '/^Subcommands:/,$s/^  \([a-z]\{1,\}\) .*/\1/p')"})
else
  help=$(kvtwin help ${words[2]} 2>/dev/null)
  if [[ ${words[CURRENT]} == -* ]]; then
    found=(${(f)"$(grep -oE -- '^  (-h,)?--[a-z-]+' <<<$help | sed 's/.*--/--/')"})
  else
    found=(${(f)"$(sed -n "s/^  $before [^ ]*{\([^}]*\)}.*/\1/p" <<<$help |
      tr ',' '\n')"})
  fi
fi
(( $#found )) && compadd -- $found || _files
