# Completion of kvtwin in bash: subcommands, options, and the values that the help
# of an option lists. All of it is read from `kvtwin help`.

_kvtwin() {
  local word=${COMP_WORDS[COMP_CWORD]} before=${COMP_WORDS[COMP_CWORD - 1]}
  local subcommand=${COMP_WORDS[1]} words= help
  compopt -o default  # Files, where nothing else is known.
  if [ "$COMP_CWORD" -eq 1 ] || { [ "$COMP_CWORD" -eq 2 ] && [ "$before" = help ]; }; then
    words="help $("${COMP_WORDS[0]}" help 2>/dev/null |
      sed -n '/^Subcommands:/,$s/^  \([a-z]\{1,\}\) .*/\1/p')"
  else
    help=$("${COMP_WORDS[0]}" help "$subcommand" 2>/dev/null)
    case $word in
      -*) words=$(grep -oE -- '^  (-h,)?--[a-z-]+' <<<"$help" | sed 's/.*--/--/') ;;
      *) words=$(sed -n "s/^  $before [^ ]*{\([^}]*\)}.*/\1/p" <<<"$help" |
        tr ',' '\n') ;;
    esac
  fi
  mapfile -t COMPREPLY < <(compgen -W "$words" -- "$word")
}
complete -F _kvtwin kvtwin
