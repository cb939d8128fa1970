#!/usr/bin/env bash
# bisect_test.sh KVTWIN ROOT: `kvtwin bisect` in a repository of a backend, whose fourth
# commit brings the bug; the second and the sixth cannot be built.
set -euo pipefail
kvtwin=$(realpath "$1") root=$2
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
cd "$scratch"
git init -q
git config user.name test && git config user.email test@example.org
commit() { git add -A && git commit -qm "$1"; }
cp "$root/docs/examples/c_cache.c" cache.c
printf '%s\n' mine.so out err >.gitignore
commit "good"
echo 'not C' >>cache.c && commit "does not compile"
sed -i '$d' cache.c && commit "compiles" && git tag fine
sed -i '1i #define BUG' cache.c && commit "the bug"
echo '/* later */' >>cache.c && commit "later"
echo 'not C' >>cache.c && commit "does not compile again"
sed -i '$d' cache.c && commit "last"
bug=$(git rev-parse HEAD~3)
branch=$(git symbolic-ref HEAD)
history='kvt1 kind=swa window=0 cells=1 legal=1 | put 0*1'
build="cc -shared -fPIC -I '$root/include' cache.c -o mine.so"
bisect() { "$kvtwin" bisect "$history" --backend ./mine.so --build "$build" "$@"; }

# expect CODE REGEX COMMAND...: checks the exit code and the output, and that the
# branch is checked out again.
expect() {
  local code=0 want=$1 regex=$2
  shift 2
  "$@" >out 2>err || code=$?
  [ "$code" -eq "$want" ] && grep -qE "$regex" out err &&
    [ "$(git symbolic-ref HEAD)" = "$branch" ] && [ ! -e .git/BISECT_LOG ] ||
    { echo "expected $want, '$regex', got $code:"; cat out err; exit 1; }
}
expect 1 "^  $bug the bug$" bisect --good HEAD~6
expect 1 "^.\"first_bad\":\[.\"commit\":\"$bug\",\"subject\":\"the bug\"" \
  bisect --good HEAD~6 --json
# The level and the profile are those of the finding: it shows by them alone.
history='kvt1 kind=swa window=1 cells=4 legal=1 | put 0*3'
expect 1 "^  $bug the bug$" bisect --good HEAD~6 --level numeric --profile ollama-0.15
expect 2 "the history does not fail at HEAD$" \
  bisect --good HEAD~6 --profile 'ollama-0.15 except window counts the query'
expect 2 "HEAD cannot be built, or does not run$" \
  bisect --good HEAD~6 --level identity
expect 2 "'flies' is not" bisect --good HEAD~6 --profile flies
history='kvt1 kind=swa window=0 cells=1 legal=1 | put 0*1'
# The commit that mends the build brings the bug.
git checkout -q HEAD~6 && git checkout -qb other && branch=refs/heads/other
echo 'not C' >>cache.c && commit "broken"
sed -i '$d; 1i #define BUG' cache.c && commit "mended with the bug"
expect 1 "is one of:$" bisect --good HEAD~2
expect 1 "^  $(git rev-parse HEAD) mended with the bug$" bisect --good HEAD~2
expect 1 "^  $(git rev-parse HEAD~1) broken$" bisect --good HEAD~2
expect 2 "the history does not fail at fine$" bisect --good HEAD~2 --bad fine
expect 2 "not ancestors of the bad" bisect --good HEAD --bad HEAD~2
expect 2 "are the same commit" bisect --good HEAD
expect 2 "HEAD~1 cannot be built, or does not run" bisect --good HEAD~1
expect 2 "Needed a single revision" bisect --good no-such-commit
for wrong in nonsense 'kvt1 | fly' 'kvp1 | fly'; do
  expect 2 "^kvtwin: history: character [18]: " "$kvtwin" bisect "$wrong" \
    --backend ./mine.so --build 'touch built' --good HEAD~2
  [ ! -e built ] || { echo "'$wrong' is built"; exit 1; }
done
echo '/* later */' >>cache.c && commit "later"
expect 2 "the history fails at HEAD~1$" bisect --good HEAD~1
# A build that ends with a comment.
build="$build # a note"
expect 1 "^  $(git rev-parse HEAD~1) mended with the bug$" bisect --good HEAD~3
# A bisection of the user goes on as it was.
git bisect start HEAD HEAD~3 >/dev/null
before=$(git rev-parse HEAD; git bisect log)
code=0
bisect --good HEAD~3 >out 2>err || code=$?
[ "$code" -eq 2 ] && grep -q "a bisection is in progress here" err &&
  [ "$(git rev-parse HEAD; git bisect log)" = "$before" ] ||
  { echo "a bisection is not left alone: $code"; cat out err; exit 1; }
git bisect reset >/dev/null 2>&1
git mv cache.c other.c
expect 2 "the checkout has changes" bisect --good HEAD~2
