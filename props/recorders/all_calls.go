//go:build ignore

// all_calls FOLDER: as all_calls.c, in Go.
package main

import (
	"bytes"
	"fmt"
	"io"
	"math"
	"os"
	"strconv"
	"strings"

	record "kvtwinrecorder"
)

const (
	many = 65536
	few  = 512
)

var wrong = 0

func expect(holds bool, what string) {
	if !holds {
		fmt.Fprintln(os.Stderr, "all_calls:", what)
		wrong = 1
	}
}

// Zeros, the ends of ranges, ties in the ninth digit, powers of ten at which
// the form changes; then any bits.
func numbers(count int) []float32 {
	special := []uint32{
		0x00000000, 0x80000000, 0x00000001, 0x807fffff, 0x00800000, 0x7f7fffff,
		0xff7fffff, 0x39000000, 0x38800000, 0x39c00000, 0x3a600000, 0x3dcccccd,
		0x3f800001, 0x4b800000, 0x4cbebc1f, 0x4cbebc20, 0x4e6e6b27, 0x4e6e6b28,
		0x38d1b716, 0x38d1b717, 0x3727c5ac, 0x501502f9, 0x42c80000, 0x461c4000}
	bits := uint32(1)
	var made []float32
	for i := 0; i < count; i++ {
		bits = bits*1664525 + 1013904223
		for bits&0x7f800000 == 0x7f800000 {
			bits = bits*1664525 + 1013904223
		}
		if i < len(special) {
			made = append(made, math.Float32frombits(special[i]))
		} else {
			made = append(made, math.Float32frombits(bits))
		}
	}
	return made
}

func sizes() record.Header {
	return record.Header{Producer: "all calls", MaxSequences: 1, Capacity: 8,
		MaxBatch: 2, Layers: 1, KHeadDim: 2, KVHeads: 1, VHeadDim: 1}
}

func start(out io.Writer, header record.Header) *record.Recorder {
	r, err := record.New(out, header)
	if err != nil {
		fmt.Fprintln(os.Stderr, "all_calls:", err)
		os.Exit(2)
	}
	return r
}

func recordEncoder(out io.Writer) {
	row := []float32{1.5, -2}
	key, value := record.Dense(row, 2, 1, 1), record.Dense(row, 1, 1, 2)
	header := sizes()
	header.Caches = []record.Cache{{Type: "encoder"}}
	r := start(out, header)
	r.StartForward(record.Pass{Positions: []int32{0}, Sequences: []int{0},
		Multimodal: []int{0}, Result: "ok"})
	r.Put(0, key, value)
	r.EncoderCached(true)
	r.Get(0, record.None, key, &value, nil)
	r.Remove(0, 0, record.OpenEnd, "")
	r.EncoderCached(false)
	expect(r.Close() == nil, "encoder")
}

func recordCausal(out io.Writer) {
	hide := float32(math.Inf(-1))
	minus := float32(math.Copysign(0, -1))
	// Two elements of a row, one of another purpose, and so on.
	rows := []float32{1, 2, 99, 3, 4, 99, 0, 0, 99, 0, 0, 99}
	values := []float32{5, 6, minus, 0}
	mask := record.Mask{Columns: 4, Rows: 4, F32: []float32{
		0, minus, hide, hide, 0, 0, hide, hide,
		hide, hide, hide, hide, hide, hide, hide, hide}}
	key := record.Tensor{Data: rows, Shape: [4]int{2, 1, 2},
		Stride: [4]int{1, 3, 3}}
	value := record.Dense(values, 4, 1, 1)
	header := sizes()
	header.Producer = "quote \" backslash \\ tab \t, \u00e9"
	header.Placement = "contiguous"
	header.Caches = []record.Cache{{Shift: "identity"}}
	header.CachePadding, header.MaskBatchPadding = 4, 4
	header.PermutedV = true
	header.MaskDType = "bits"
	header.DType = "f16"
	header.VDType = "f32"
	r := start(out, header)
	pass := record.Pass{Positions: []int32{0, 1}, Sequences: []int{0, 0}}
	pass.Reserve = true
	r.StartForward(pass)
	r.ReservedMask(8, 4, 0)
	pass.Reserve = false
	pass.Cells = []int{0, 1}
	r.StartForward(pass)
	r.SetCausal([]int{0})
	r.Put(0, key, record.Dense(values[:2], 1, 1, 2))
	key.Shape[2] = 4
	r.Get(0, 0, key, &value, &mask)
	r.Get(0, record.None, key, nil, &mask)
	r.CanResume(0, 2, true)
	r.CopyPrefix(0, 1, 1)
	r.Remove(1, 0, 1, "ok")
	r.Remove(0, 0, 1, "ok")
	expect(r.Close() == nil, "causal")
}

// With a tensor of four dimensions, of one tile of V.
func recordWrapper(out io.Writer) {
	tile, keys, sees := make([]float32, 32), make([]float32, 64), make([]bool, 32)
	header := sizes()
	header.Placement = "scatter"
	header.TiledV = true
	header.CachePadding = 32
	header.Caches = []record.Cache{
		{Type: "swa", Window: 0, Shift: "rope"},
		{Type: "chunked", Chunk: 2},
		{Type: "swa_mem", Window: 1, Memory: 3, Shift: "rope",
			RopePairing: "halves", RopeBase: 1e6, RopeScale: 0.1, RopeDims: 2},
		{Type: "swa_mem", Window: -1, Memory: -1}}
	r := start(out, header)
	r.StartForward(record.Pass{Positions: []int32{0}, Sequences: []int{0}})
	r.SetLayerType(1)
	keys[0], keys[1], tile[0], sees[0] = 7, 8, 9, true
	r.Put(0, record.Dense(keys[:2], 2, 1, 1), record.Dense(tile[:1], 1, 1, 1))
	value := record.Tensor{Data: tile, Shape: [4]int{32, 1, 1, 1}}
	r.Get(0, 0, record.Dense(keys, 2, 1, 32), &value,
		&record.Mask{Bool: sees, Columns: 32, Rows: 1})
	expect(r.Close() == nil, "wrapper")
}

// A window of one position, and a sink of the second head. Of two tokens that a
// row sees, one has all of the weight that the sink leaves, or the sink has
// all. With wrongOne, the last head of the last row sees the first token, too.
func recordAttention(out io.Writer, wrongOne bool) {
	outputs := []float32{0.9375, 0.5, 3, 1, 3, 0}
	if wrongOne {
		outputs[5] = 0.5
	}
	header := sizes()
	header.Caches = []record.Cache{{Type: "swa", Window: 1}}
	header.MaxBatch = 3
	header.AttendDType = "f32"
	header.AttendTolerance = 0.1
	header.AttendSoftCap = 1e6
	header.AttendSinks = []float32{-9999.5, 0}
	r := start(out, header)
	r.StartForward(record.Pass{Positions: []int32{0, 1, 2}, Sequences: []int{0, 0, 0}})
	r.Put(0, record.Dense([]float32{1, 0, 0, 1, 1, 1}, 2, 1, 3),
		record.Dense([]float32{1, 3, 8}, 1, 1, 3))
	queries := []float32{0, 0, 0, 0, 0, 9999, 9999, 0, -9999, 0, 0, -9999}
	r.Attend(0, record.Dense(queries, 2, 2, 3), record.Dense(outputs, 1, 2, 3))
	expect(r.Close() == nil, "attention")
}

// A hybrid cache whose second part has recurrent state. A later sequence begins
// with two tokens of the first one.
func recordHybrid(out io.Writer) {
	rows, values := []float32{1, 2, 3, 4, 5, 6}, []float32{7, 8, 9}
	sees := []bool{true, false, true, true, true, true}
	header := sizes()
	header.Hybrid, header.Prompts = true, true
	header.Caches = []record.Cache{{}, {Type: "recurrent", CheckpointEvery: 1,
		Checkpoints: 2, Pins: 1}}
	r := start(out, header)
	r.FindPrefix(0, []int32{7, 8}, 0)
	r.StartForward(record.Pass{Positions: []int32{0, 1}, Sequences: []int{0, 0}})
	r.SetLayerType(0)
	key, value := record.Dense(rows[:4], 2, 1, 2), record.Dense(values[:2], 1, 1, 2)
	r.Put(0, key, value)
	r.Get(0, record.None, key, &value, &record.Mask{Bool: sees[:4], Columns: 2, Rows: 2})
	r.SetLayerType(1)
	r.Put(0, key, value)
	r.Checkpoint(0)
	r.Remove(0, 0, record.OpenEnd, "")
	r.FindPrefix(0, []int32{7, 8, 9}, 2)
	r.StartForward(record.Pass{Positions: []int32{2}, Sequences: []int{0}})
	r.SetLayerType(0)
	r.Put(0, record.Dense(rows[4:], 2, 1, 1), record.Dense(values[2:], 1, 1, 1))
	all, state := record.Dense(values, 1, 1, 3), record.Dense(values[1:2], 1, 1, 1)
	r.Get(0, record.None, record.Dense(rows, 2, 1, 3), &all,
		&record.Mask{Bool: sees[2:5], Columns: 3, Rows: 1})
	r.SetLayerType(1)
	r.Get(0, record.None, record.Dense(rows[2:4], 2, 1, 1), &state,
		&record.Mask{Bool: sees[:1], Columns: 1, Rows: 1})
	expect(r.Close() == nil, "hybrid")
}

// Two drafts of one position, of which the second is committed.
func recordDrafts(out io.Writer) {
	rows, values := []float32{1, 2, 3, 4, 5, 6}, []float32{7, 8, 9}
	header := sizes()
	header.Drafts = true
	r := start(out, header)
	r.StartForward(record.Pass{Positions: []int32{0, 0}, Sequences: []int{0, 0},
		Parents: []int{-1, -1}})
	key, value := record.Dense(rows[:4], 2, 1, 2), record.Dense(values[:2], 1, 1, 2)
	r.Put(0, key, value)
	r.Get(0, record.None, key, &value,
		&record.Mask{Bool: []bool{true, false, false, true}, Columns: 2, Rows: 2})
	r.Commit(0, []int{1})
	r.StartForward(record.Pass{Positions: []int32{1}, Sequences: []int{0}})
	r.Put(0, record.Dense(rows[4:], 2, 1, 1), record.Dense(values[2:], 1, 1, 1))
	value = record.Dense(values[1:], 1, 1, 2)
	r.Get(0, record.None, record.Dense(rows[2:], 2, 1, 2), &value,
		&record.Mask{Bool: []bool{true, true}, Columns: 2, Rows: 1})
	expect(r.Close() == nil, "drafts")
}

func recordNumbers(out io.Writer, count int) {
	made := numbers(count)
	header := sizes()
	header.KHeadDim = count
	r := start(out, header)
	r.StartForward(record.Pass{Positions: []int32{0}, Sequences: []int{0}})
	r.Put(0, record.Dense(made, count, 1, 1), record.Dense(made[:1], 1, 1, 1))
	expect(r.Close() == nil, "numbers")
}

// The first list of data that was written has the same numbers, bit by bit.
func readBack(count int) {
	var text bytes.Buffer
	recordNumbers(&text, count)
	_, list, found := strings.Cut(text.String(), `"data":[`)
	expect(found, "no numbers were written")
	list, _, _ = strings.Cut(list, "]")
	read := strings.Split(list, ",")
	made := numbers(count)
	expect(len(read) == count, "not as many numbers")
	for i, number := range read {
		parsed, err := strconv.ParseFloat(number, 32)
		same := math.Float32bits(float32(parsed)) == math.Float32bits(made[i])
		expect(err == nil && same, "a number reads back as another one")
	}
}

// One call that cannot be recorded.
func refused(out io.Writer, call func(r *record.Recorder) error) {
	var text bytes.Buffer
	r := start(&text, sizes())
	before := text.Len()
	err := call(r)
	expect(err != nil, "a call is not refused")
	if err != nil {
		fmt.Fprintln(out, err)
	}
	expect(r.CanResume(0, 0, true) != nil, "a call is written after an error")
	closing := r.Close()
	expect(closing != nil && closing.Error() == err.Error(),
		"close does not return the first error")
	expect(text.Len() == before, "something is written in spite of an error")
}

func writeRefusals(out io.Writer) {
	infinite, nan := float32(math.Inf(1)), float32(math.NaN())
	good := []float32{1, 2, 3, 4}
	g := record.Dense(good, 2, 1, 2)
	n := record.Dense([]float32{1, nan, 3, 4}, 2, 1, 2)
	i := record.Dense([]float32{1, 2, 3, infinite}, 2, 1, 2)
	none := record.Dense(good, 2, 0, 2)
	large := record.Dense(good, 1<<40, 1<<40, 1<<40)
	put := func(key, value record.Tensor) {
		refused(out, func(r *record.Recorder) error { return r.Put(0, key, value) })
	}
	get := func(key, value record.Tensor, mask *record.Mask) {
		refused(out, func(r *record.Recorder) error {
			return r.Get(0, 0, key, &value, mask)
		})
	}
	put(n, g)
	put(g, i)
	get(i, g, nil)
	get(g, n, nil)
	put(none, g)
	put(g, large)
	get(g, g, &record.Mask{F32: good, Columns: 0, Rows: 2})
	get(g, g, &record.Mask{F32: []float32{0, 0.5}, Columns: 2, Rows: 1})
	get(g, g, &record.Mask{F32: []float32{infinite, 0}, Columns: 2, Rows: 1})
	get(g, g, &record.Mask{F32: []float32{0, nan}, Columns: 1, Rows: 2})
	refused(out, func(r *record.Recorder) error { return r.Attend(0, n, g) })
	refused(out, func(r *record.Recorder) error { return r.Attend(0, g, i) })
	header := sizes()
	header.KVHeads = 0
	_, err := record.New(out, header)
	fmt.Fprintln(out, err)
	header = sizes()
	header.Caches = []record.Cache{{RopeScale: float64(nan)}}
	_, err = record.New(out, header)
	fmt.Fprintln(out, err)
	header = sizes()
	header.AttendSinks = []float32{1, nan}
	_, err = record.New(out, header)
	fmt.Fprintln(out, err)

	// Calls that C cannot check.
	out = io.Discard
	put(record.Dense(good[:3], 2, 1, 2), g)
	outside := record.Tensor{Data: good, Shape: [4]int{2, 1, 2},
		Stride: [4]int{1, 1, 3}}
	put(outside, g)
	outside.Stride = [4]int{-1, 1, 1}
	put(outside, g)
	get(g, g, &record.Mask{F32: good, Columns: 3, Rows: 1})
	get(g, g, &record.Mask{Columns: 3, Rows: 1})
	get(g, g, &record.Mask{F32: good, Bool: make([]bool, 4), Columns: 2, Rows: 2})
	_, err = record.Create("/no/such/folder/file", sizes())
	expect(err != nil && strings.Contains(err.Error(), "/no/such/folder/file"),
		"no path in the error")
}

func file(name string) *os.File {
	out, err := os.Create(os.Args[1] + "/" + name)
	if err != nil {
		os.Exit(2)
	}
	return out
}

func main() {
	out := file("all_calls.jsonl")
	recordEncoder(out)
	recordCausal(out)
	recordWrapper(out)
	recordAttention(out, false)
	recordDrafts(out)
	recordHybrid(out)
	recordNumbers(out, few)
	out.Close()
	out = file("wrong_attention.jsonl")
	recordAttention(out, true)
	out.Close()
	out = file("refused.txt")
	writeRefusals(out)
	out.Close()
	readBack(many)
	os.Exit(wrong)
}
