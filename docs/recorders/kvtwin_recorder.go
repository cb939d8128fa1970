// Package kvtwinrecorder records the calls to a KV cache and its answers, for
// `kvtwin check`. Copy this file into a folder kvtwinrecorder of your module:
// it needs only the standard library.
//
//	r, err := kvtwinrecorder.Create("my.jsonl", kvtwinrecorder.Header{
//		Producer:     "my cache 1.2",
//		MaxSequences: 2, Capacity: 64, MaxBatch: 8,
//		Layers: 1, KHeadDim: 64, KVHeads: 2, VHeadDim: 64,
//	})
//	if err != nil {
//		return err
//	}
//
//	pass := kvtwinrecorder.Pass{
//		Positions: []int32{0, 1, 2}, Sequences: []int{0, 0, 0}}
//	if errors.Is(cache.StartForward(...), ErrCacheFull) {
//		pass.Result = "cache_full"
//	}
//	r.StartForward(pass)
//	cache.Put(0, k, v)
//	r.Put(0, kvtwinrecorder.Dense(k, 64, 2, 3), kvtwinrecorder.Dense(v, 64, 2, 3))
//	kView, vView, mask := cache.Get(0)
//	n := len(kView) / (64 * 2)
//	value := kvtwinrecorder.Dense(vView, 64, 2, n)
//	r.Get(0, kvtwinrecorder.None, kvtwinrecorder.Dense(kView, 64, 2, n), &value,
//		&kvtwinrecorder.Mask{F32: mask, Columns: n, Rows: 3})
//
//	return r.Close()
//
// An engine that does not show its rows, but what its attention made of them
// (AttendDType: "bf16"), has in place of the Get:
//
//	out := cache.Attend(0, query)
//	r.Attend(0, kvtwinrecorder.Dense(query, 64, 8, 3),
//		kvtwinrecorder.Dense(out, 64, 8, 3))
//
// Call each method after your cache has answered the call that it records. It
// writes one line, and returns an error if the line cannot be written. The
// first error is kept: after it nothing is written, and Close returns it, too.
// So it is enough to check the results of Create and Close. A line is handed to
// the system at once: if your program crashes, all lines before the crash are
// in the file.
//
// The fields have the names that kvtwin's docs/trace_format.md explains. Calls
// that your cache rejects as misuse are not recorded. The methods check only
// whether a line can be written; `kvtwin check` says what else is wrong with a
// recording, and in which line.
//
// Not supported: pools of blocks (`"type": "paged"`), whose lines are on the
// same page. Not safe for concurrent use: one call at a time of one Recorder.
package kvtwinrecorder

import (
	"errors"
	"fmt"
	"io"
	"math"
	"os"
	"strconv"
	"strings"
)

const (
	None       = -1            // As firstCell: it is not recorded.
	OpenEnd    = math.MaxInt32 // As the end of Remove.
	NumbersMax = 64 << 20      // Numbers of one tensor.
)

// Fields that are "" or 0 have their default, if a default is stated.

type Cache struct {
	// "causal" (default), "swa", "swa_mem", "chunked", "encoder" or "recurrent".
	Type string
	// For swa and swa_mem: how many positions before its own a token sees. An
	// engine whose window of n includes the token records n - 1. Negative: not
	// recorded.
	Window int
	Memory int // For swa_mem. Negative: not recorded.
	Chunk  int // For chunked. Negative: not recorded.
	// "none" (default), "identity", "add", "tag_add" or "rope".
	Shift string
	// For "rope": "adjacent" (default) or "halves"; base 10000, scale 1.
	RopePairing         string
	RopeBase, RopeScale float64
	RopeDims            int
	// For recurrent.
	CheckpointEvery, Checkpoints, Pins, Drafts int
}

type Header struct {
	Producer  string  // Free text, in UTF-8.
	Placement string  // "contiguous", "scatter" or "other" (default).
	Caches    []Cache // Default: one cache. Several: those of a wrapper.
	Hybrid    bool    // Several caches are those of a hybrid cache.

	CachePadding, MaskBatchPadding int    // Default: 1.
	PermutedV, TiledV              bool   // Layout of V in Get.
	MaskDType                      string // "f32" (default), "f16", "bf16" or "bits".
	VDType                         string // Default: same as DType.

	DType                               string // "f32" (default), "f16", "bf16", "f8_e4m3", ...
	MaxSequences, Capacity, MaxBatch    int
	Layers, KHeadDim, KVHeads, VHeadDim int

	// For Attend: "f32", or the "f16" or "bf16" to which the engine rounds
	// queries, scores, weights or outputs. "": it is not called.
	AttendDType     string
	AttendTolerance float64   // The error of the cache's number formats.
	AttendSoftCap   float64   // Default: none.
	AttendSinks     []float32 // A logit for each query head; default: none.

	Drafts  bool // Passes have Parents, and Commit is called.
	Prompts bool // FindPrefix or Checkpoint is called.
}

// Tensor has rows as f32; convert rows of other dtypes, exactly. K is
// [k_head_dim, kv_heads, n], V [v_head_dim, kv_heads, n], first dimension
// fastest; Shape[3] is 0 unless V is tiled. Strides are in elements; if all are
// 0, the tensor is dense.
type Tensor struct {
	Data   []float32
	Shape  [4]int
	Stride [4]int
}

// Mask is [columns, rows], columns fastest, dense. Set one of the two slices:
// F32 to 0 (may attend) or -inf, or Bool to true (may attend) or false.
type Mask struct {
	F32           []float32
	Bool          []bool
	Columns, Rows int
}

// Pass is a call of StartForward, and its answer.
type Pass struct {
	Positions  []int32
	Sequences  []int
	Reserve    bool
	Multimodal []int  // Indices of tokens; may be nil.
	Result     string // "ok" (default) or "cache_full".
	Cells      []int  // One for each token; nil: not recorded.
	// One for each token: the number of the draft that a draft follows, -1 for
	// the committed tokens, -2 for a token that is not a draft; nil: no drafts.
	Parents []int
}

// Recorder writes one recording.
type Recorder struct {
	out  io.Writer
	file *os.File // Close closes it.
	line []byte
	err  error // The first error.
}

// Dense returns a dense tensor.
func Dense(data []float32, headDim, heads, n int) Tensor {
	return Tensor{Data: data, Shape: [4]int{headDim, heads, n, 0}}
}

// New records to your own writer: a pipe, memory, or a file with several
// recordings one after the other.
func New(out io.Writer, header Header) (*Recorder, error) {
	r := &Recorder{out: out}
	if err := header.check(); err != nil {
		return nil, err
	}
	r.header(header)
	if err := r.end(); err != nil {
		return nil, err
	}
	return r, nil
}

// Create records to a file, which is created or overwritten.
func Create(path string, header Header) (*Recorder, error) {
	if err := header.check(); err != nil {
		return nil, err
	}
	file, err := os.Create(path)
	if err != nil {
		return nil, err
	}
	r, err := New(file, header)
	if err != nil {
		file.Close()
		return nil, err
	}
	r.file = file
	return r, nil
}

// Close returns the first error of all calls, for example of a full disk.
func (r *Recorder) Close() error {
	if r.file != nil {
		if err := r.file.Close(); r.err == nil {
			r.err = err
		}
		r.file = nil
	}
	err := r.err
	if err == nil {
		r.err = errors.New("the recording is closed")
	}
	return err
}

func (r *Recorder) StartForward(pass Pass) error {
	r.op("start_forward")
	ints(r, "positions", pass.Positions)
	ints(r, "sequences", pass.Sequences)
	if pass.Parents != nil {
		ints(r, "parents", pass.Parents)
	}
	if pass.Reserve {
		r.print(`,"reserve":true`)
	}
	if len(pass.Multimodal) > 0 {
		ints(r, "multimodal", pass.Multimodal)
	}
	r.textKey("result", or(pass.Result, "ok"))
	if pass.Cells != nil {
		ints(r, "cells", pass.Cells)
	}
	return r.end()
}

func (r *Recorder) SetCausal(except []int) error {
	r.op("set_causal")
	ints(r, "except", except)
	return r.end()
}

func (r *Recorder) SetLayerType(kind int) error {
	r.op("set_layer_type")
	r.print(`,"type":%d`, kind)
	return r.end()
}

func (r *Recorder) Put(layer int, key, value Tensor) error {
	r.op("put")
	r.print(`,"layer":%d`, layer)
	r.tensor("put: ", "key", key)
	r.tensor("put: ", "value", value)
	return r.end()
}

// Get records the view of a get. If firstCell is None or value nil, it is not
// recorded. mask is nil for an encoder.
func (r *Recorder) Get(layer, firstCell int, key Tensor, value *Tensor,
	mask *Mask) error {
	r.op("get")
	r.print(`,"layer":%d`, layer)
	r.limit("first_cell", firstCell)
	r.tensor("get: ", "key", key)
	if value != nil {
		r.tensor("get: ", "value", *value)
	}
	if mask != nil {
		r.mask(*mask)
	} else {
		r.print(`,"mask":null`)
	}
	return r.end()
}

// Attend records what attention over the batch's pass answered: query
// [k_head_dim, heads, tokens], out [v_head_dim, heads, tokens].
func (r *Recorder) Attend(layer int, query, out Tensor) error {
	r.op("attend")
	r.print(`,"layer":%d`, layer)
	r.tensor("attend: ", "query", query)
	r.tensor("attend: ", "out", out)
	return r.end()
}

// ReservedMask records the shape of a reserving pass's mask; firstCell as in
// Get.
func (r *Recorder) ReservedMask(columns, rows, firstCell int) error {
	r.op("reserved_mask")
	r.print(`,"shape":[%d,%d]`, columns, rows)
	r.limit("first_cell", firstCell)
	return r.end()
}

// Remove records a removal; result is "ok" (also ""), "not_supported" or
// "shared_cells".
func (r *Recorder) Remove(seq int, begin, end int32, result string) error {
	r.op("remove")
	r.print(`,"seq":%d,"begin":%d,"end":%d`, seq, begin, end)
	r.textKey("result", or(result, "ok"))
	return r.end()
}

func (r *Recorder) CopyPrefix(src, dst int, length int32) error {
	r.op("copy_prefix")
	r.print(`,"src":%d,"dst":%d,"len":%d`, src, dst, length)
	return r.end()
}

// Commit: the drafts with these numbers become tokens, the others are gone.
func (r *Recorder) Commit(seq int, path []int) error {
	r.op("commit")
	r.print(`,"seq":%d`, seq)
	ints(r, "path", path)
	return r.end()
}

// FindPrefix: `ids` is the prompt of a sequence without tokens, which begins
// with `length` of them.
func (r *Recorder) FindPrefix(seq int, ids []int32, length int) error {
	r.op("find_prefix")
	r.print(`,"seq":%d`, seq)
	ints(r, "tokens", ids)
	r.print(`,"len":%d`, length)
	return r.end()
}

func (r *Recorder) Checkpoint(seq int) error {
	r.op("checkpoint")
	r.print(`,"seq":%d`, seq)
	return r.end()
}

func (r *Recorder) CanResume(seq int, pos int32, result bool) error {
	r.op("can_resume")
	r.print(`,"seq":%d,"pos":%d,"result":%t`, seq, pos, result)
	return r.end()
}

func (r *Recorder) EncoderCached(result bool) error {
	r.op("encoder_cached")
	r.print(`,"result":%t`, result)
	return r.end()
}

func or(text, other string) string {
	if text == "" {
		return other
	}
	return text
}

func orNumber(number, other float64) float64 {
	if number == 0 {
		return other
	}
	return number
}

func orInt(number, other int) int {
	if number == 0 {
		return other
	}
	return number
}

func finite(number float64) bool {
	return !math.IsNaN(number) && !math.IsInf(number, 0)
}

func (r *Recorder) print(format string, arguments ...any) {
	r.line = append(r.line, fmt.Sprintf(format, arguments...)...)
}

func (r *Recorder) op(name string) {
	r.line = r.line[:0]
	r.print(`{"op":"%s"`, name)
}

func (r *Recorder) fail(format string, arguments ...any) {
	if r.err == nil {
		r.err = fmt.Errorf(format, arguments...)
	}
}

// end writes the line, unless there was an error.
func (r *Recorder) end() error {
	if r.err == nil {
		r.line = append(r.line, "}\n"...)
		_, r.err = r.out.Write(r.line)
	}
	return r.err
}

func (r *Recorder) text(text string) {
	r.line = append(r.line, '"')
	for i := 0; i < len(text); i++ {
		switch c := text[i]; {
		case c < 0x20:
			r.print(`\u%04x`, c)
		case c == '"' || c == '\\':
			r.line = append(r.line, '\\', c)
		default:
			r.line = append(r.line, c)
		}
	}
	r.line = append(r.line, '"')
}

func (r *Recorder) textKey(key, text string) {
	r.print(`,"%s":`, key)
	r.text(text)
}

// limit writes a field, unless it is negative.
func (r *Recorder) limit(key string, number int) {
	if number >= 0 {
		r.print(`,"%s":%d`, key, number)
	}
}

func ints[T int | int32](r *Recorder, key string, numbers []T) {
	r.print(`,"%s":[`, key)
	for i, number := range numbers {
		if i > 0 {
			r.line = append(r.line, ',')
		}
		r.line = strconv.AppendInt(r.line, int64(number), 10)
	}
	r.line = append(r.line, ']')
}

// extents returns the shape, the strides, and the number of elements.
func (t Tensor) extents() (shape, stride [4]int, count int, err error) {
	shape, stride = t.Shape, t.Stride
	if shape[3] == 0 {
		shape[3] = 1
	}
	count = 1
	for d, extent := range shape {
		if extent < 1 {
			return shape, stride, 0, fmt.Errorf(
				"extent %d is %d, it must be 1 or more", d, extent)
		}
		if extent > NumbersMax/count {
			return shape, stride, 0, fmt.Errorf("more than %d numbers", NumbersMax)
		}
		if t.Stride == [4]int{} {
			stride[d] = count
		}
		count *= extent
	}
	if t.Stride == [4]int{} && count != len(t.Data) {
		return shape, stride, 0, fmt.Errorf(
			"%d numbers, of its shape there are %d", len(t.Data), count)
	}
	return shape, stride, count, nil
}

func (r *Recorder) tensor(call, name string, tensor Tensor) {
	shape, stride, count, err := tensor.extents()
	if err != nil {
		r.fail("%s%s: %w", call, name, err)
	}
	if r.err != nil {
		return
	}
	r.print(`,"%s":{"shape":[%d,%d,%d`, name, shape[0], shape[1], shape[2])
	if tensor.Shape[3] != 0 {
		r.print(",%d", shape[3])
	}
	r.print(`],"data":[`)
	for i := 0; i < count; i++ {
		offset, rest := 0, i
		for d, extent := range shape {
			offset += rest % extent * stride[d]
			rest /= extent
		}
		if offset < 0 || offset >= len(tensor.Data) {
			r.fail("%s%s: element %d lies outside of its data", call, name, i)
			return
		}
		number := float64(tensor.Data[offset])
		if !finite(number) {
			r.fail("%s%s: element %d is not finite, which no recording can hold", call, name, i)
			return
		}
		if i > 0 {
			r.line = append(r.line, ',')
		}
		r.line = strconv.AppendFloat(r.line, number, 'g', 9, 64)
	}
	r.print("]}")
}

func (r *Recorder) mask(mask Mask) {
	columns, rows := mask.Columns, mask.Rows
	if (mask.F32 == nil) == (mask.Bool == nil) {
		r.fail("get: mask must be f32 or bool, one of them")
	} else if columns < 1 || rows < 1 || rows > NumbersMax/columns {
		r.fail("get: mask has %d columns and %d rows", columns, rows)
	} else if count := len(mask.F32) + len(mask.Bool); count != columns*rows {
		r.fail("get: mask: %d elements, of its shape there are %d", count,
			columns*rows)
	}
	if r.err != nil {
		return
	}
	r.print(`,"mask":{"shape":[%d,%d],"rows":["`, columns, rows)
	for i := 0; i < columns*rows; i++ {
		if i > 0 && i%columns == 0 {
			r.print(`","`)
		}
		sees := byte('0')
		if mask.Bool != nil && mask.Bool[i] || mask.F32 != nil && mask.F32[i] == 0 {
			sees = '1'
		} else if mask.F32 != nil && !math.IsInf(float64(mask.F32[i]), -1) {
			r.fail("get: mask: element %d is neither 0 nor -inf", i)
			return
		}
		r.line = append(r.line, sees)
	}
	r.print(`"]}`)
}

func (header Header) check() error {
	sizes := []int{header.MaxSequences, header.Capacity, header.MaxBatch,
		header.Layers, header.KHeadDim, header.KVHeads, header.VHeadDim}
	names := []string{"max_sequences", "capacity", "max_batch", "layers",
		"k_head_dim", "kv_heads", "v_head_dim"}
	for i, size := range sizes {
		if size < 1 {
			return fmt.Errorf("header: %s is %d, it must be 1 or more", names[i], size)
		}
	}
	for _, cache := range header.Caches {
		if !finite(cache.RopeBase) || !finite(cache.RopeScale) {
			return errors.New("header: rope_base or rope_scale is not finite")
		}
	}
	numbers := append([]float32{}, header.AttendSinks...)
	for _, number := range append(numbers, float32(header.AttendTolerance), float32(header.AttendSoftCap)) {
		if !finite(float64(number)) {
			return errors.New("header: a number for attend is not finite")
		}
	}
	return nil
}

func (r *Recorder) cache(cache Cache) {
	kind, shift := or(cache.Type, "causal"), or(cache.Shift, "none")
	r.print(`{"type":`)
	r.text(kind)
	if strings.HasPrefix(kind, "swa") {
		r.limit("window", cache.Window)
	}
	if kind == "swa_mem" {
		r.limit("memory", cache.Memory)
	}
	if kind == "chunked" {
		r.limit("chunk", cache.Chunk)
	}
	if kind == "recurrent" {
		r.print(`,"checkpoint_every":%d,"checkpoints":%d,"pins":%d,"drafts":%d`,
			cache.CheckpointEvery, cache.Checkpoints, cache.Pins, cache.Drafts)
	} else if kind != "encoder" {
		r.textKey("shift", shift)
	}
	if shift == "rope" {
		r.print(`,"rope":{"pairing":`)
		r.text(or(cache.RopePairing, "adjacent"))
		r.print(`,"base":`)
		r.line = strconv.AppendFloat(r.line, orNumber(cache.RopeBase, 10000), 'g', 17, 64)
		r.print(`,"scale":`)
		r.line = strconv.AppendFloat(r.line, orNumber(cache.RopeScale, 1), 'g', 17, 64)
		r.print(`,"dims":%d}`, cache.RopeDims)
	}
	r.print("}")
}

func (r *Recorder) header(header Header) {
	version := 1
	if header.AttendDType != "" {
		version = 2
	}
	if header.Drafts {
		version = 3
	}
	if header.Prompts {
		version = 4
	}
	r.print(`{"kvtrace":%d,"producer":`, version)
	r.text(header.Producer)
	r.textKey("placement", or(header.Placement, "other"))
	r.print(`,"cache":`)
	caches := header.Caches
	if len(caches) == 0 {
		caches = []Cache{{}}
	}
	if len(caches) > 1 {
		kind := "wrapper"
		if header.Hybrid {
			kind = "hybrid"
		}
		r.print(`{"type":"%s","caches":[`, kind)
	}
	for i, cache := range caches {
		if i > 0 {
			r.print(",")
		}
		r.cache(cache)
	}
	if len(caches) > 1 {
		r.print("]}")
	}
	r.print(`,"config":{"cache_padding":%d,"mask_batch_padding":%d,`+
		`"permuted_v":%t,"tiled_v":%t`, orInt(header.CachePadding, 1),
		orInt(header.MaskBatchPadding, 1), header.PermutedV, header.TiledV)
	r.textKey("mask_dtype", or(header.MaskDType, "f32"))
	if header.VDType != "" {
		r.textKey("v_dtype", header.VDType)
	}
	r.print(`},"init":{"dtype":`)
	r.text(or(header.DType, "f32"))
	r.print(`,"max_sequences":%d,"capacity":%d,"max_batch":%d}`,
		header.MaxSequences, header.Capacity, header.MaxBatch)
	r.print(`,"model":{"layers":%d,"k_head_dim":%d,"kv_heads":%d,"v_head_dim":%d}`,
		header.Layers, header.KHeadDim, header.KVHeads, header.VHeadDim)
	if header.AttendDType != "" {
		r.attend(header)
	}
}

func (r *Recorder) attend(header Header) {
	r.print(`,"attend":{"dtype":`)
	r.text(header.AttendDType)
	r.print(`,"tolerance":`)
	r.line = strconv.AppendFloat(r.line, header.AttendTolerance, 'g', 17, 64)
	r.print(`,"soft_cap":`)
	r.line = strconv.AppendFloat(r.line, header.AttendSoftCap, 'g', 17, 64)
	r.print(`,"sinks":[`)
	for i, sink := range header.AttendSinks {
		if i > 0 {
			r.line = append(r.line, ',')
		}
		r.line = strconv.AppendFloat(r.line, float64(sink), 'g', 9, 64)
	}
	r.print("]}")
}
