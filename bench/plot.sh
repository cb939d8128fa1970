#!/usr/bin/env bash
# plot.sh GOALS.json DECODE.csv PICTURE.png
#
# Left: how far each goal is from being missed. Right: the time of a decode step
# over the number of cells.
set -euo pipefail
goals=$1 decode=$2 picture=$3
data=$(mktemp -d)
trap 'rm -rf "$data"' EXIT

# Every row is one line: name, ratio / goal.
awk -F '"' '$2 == "name" {
  gsub(/[:,]/, "", $11); gsub(/[:,]/, "", $13)
  printf "\"%s\"\t%s\n", $4, $11 / $13
}' "$goals" | tac >"$data/goals"

# Cells and nanoseconds; of several targets, only the first one, the best.
for twin in optimized reference; do
  awk -F '[",/:]+' -v twin="$twin" '
    $2 == "Decode" && $3 == twin && !seen[$5]++ {
      line = $0
      sub(/^"[^"]*",/, "", line)
      split(line, field, ",")
      print $5, field[2]
    }' "$decode" >"$data/$twin"
done

gnuplot <<EOF
set terminal pngcairo size 1400,1000 font "DejaVu Sans,9"
set output "$picture"
set multiplot
set grid x lc rgb "#dddddd"
set logscale x
set size 0.68,1
set title "Time by the time that the goal allows (left of the line: met)"
set xrange [0.001:100]
set yrange [-1:$(wc -l <"$data/goals")]
set format x "%g"
set arrow from 1, graph 0 to 1, graph 1 nohead lc rgb "#cc3311" lw 1.5
set lmargin 62
plot "$data/goals" using (\$2 > 100 ? 100 : \$2 < 0.001 ? 0.001 : \$2):0:ytic(1) \\
  with points pt 7 ps 0.9 lc rgb "#0077bb" notitle
unset arrow
set size 0.32,0.6
set origin 0.68,0.2
set lmargin 10
set title "Decode step of one token, its mask included"
set xlabel "cells"
set ylabel "nanoseconds"
set logscale xy
set xrange [2048:2097152]
set yrange [*:*]
set ytics auto
set format y "10^%T"
set xtics ("4k" 4096, "32k" 32768, "256k" 262144, "1M" 1048576)
set key top left
plot "$data/reference" with linespoints pt 5 lc rgb "#cc3311" title "reference", \\
  "$data/optimized" with linespoints pt 7 lc rgb "#0077bb" title "optimized"
EOF
