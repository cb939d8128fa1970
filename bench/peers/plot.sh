#!/usr/bin/env bash
# plot.sh PEERS.tsv PICTURE.png
#
# Above: the share of the read bandwidth that decode reaches, over the number of
# cells. Below: the share of the FMA peak that prefill reaches.
set -euo pipefail
rows=$1 picture=$2
data=$(mktemp -d)
trap 'rm -rf "$data"' EXIT

cut -f 3 "$rows" | awk '!seen[$0]++' >"$data/peers"
dtypes=(f32 f16 bf16 8-bit)
cut -f 2,4 "$rows" | awk '$1 == "prefill" && !seen[$2]++ { print $2 }' \
  >"$data/cases"

# part KIND DTYPE: writes $data/KIND-DTYPE, whose blocks are the peers.
part() {
  local peer
  while read -r peer; do
    awk -F '\t' -v kind="$1" -v dtype="$2" -v peer="$peer" '
      NR == FNR { place[$1] = FNR; next }
      $1 == dtype && $2 == kind && $3 == peer {
        print kind == "decode" ? $4 : place[$4], $5
        ++count
      }
      END { if (!count) print "1 NaN"; print "\n" }' \
      "$data/cases" "$rows" >>"$data/$1-$2"
  done <"$data/peers"
}

plots() {
  local dtype kind i peers
  mapfile -t peers <"$data/peers"
  for kind in decode prefill; do
    if [ $kind = decode ]; then
      echo 'set logscale x; set xrange [700:400000]'
      echo 'set xtics ("1k" 1024, "4k" 4096, "32k" 32768, "256k" 262144)'
    else
      echo "unset logscale x; set xrange [0.5:$(wc -l <"$data/cases").5]"
      echo "set xtics ($(awk '{ printf "%s\"%s\" %d", (NR > 1 ? ", " : ""), $1, NR }' \
        "$data/cases"))"
    fi
    for dtype in "${dtypes[@]}"; do
      echo "set title \"$kind, $dtype\""
      [ "$kind $dtype" = "decode f32" ] && echo 'set key top left' ||
        echo 'unset key'
      printf 'plot '
      for i in "${!peers[@]}"; do
        [ "$i" -eq 0 ] || printf ', '
        printf '"%s" index %d with linespoints lt %d lw 2 pt 7 title "%s"' \
          "$data/$kind-$dtype" "$i" "$((i + 1))" "${peers[i]}"
      done
      echo
    done
  done
}

for kind in decode prefill; do
  for dtype in "${dtypes[@]}"; do part $kind "$dtype"; done
done
count=0
{
  cat <<END
set terminal pngcairo noenhanced size 1600,900 font "DejaVu Sans,9"
set output "$picture"
set multiplot layout 2,4 title "% of the read bandwidth (decode), of the FMA peak (prefill)"
set grid lc rgb "#dddddd"
set yrange [0:130]
$(for color in cc3311 0077bb 33bbee 009988 ee7733 aa3377 228833 bbbb22 000000 \
    ee99aa; do
    echo "set linetype $((++count)) lc rgb \"#$color\""
  done)
END
  plots
} | gnuplot
