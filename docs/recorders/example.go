//go:build ignore

// A toy KV cache that records itself, and a program that uses it. With
// kvtwin_recorder.go in a folder kvtwinrecorder of your GOPATH:
//
//	GO111MODULE=off go run example.go toy.jsonl
//	kvtwin check toy.jsonl
//
// It has a list of tokens for each sequence, so its placement is "other". With
// --bug it forgets the last token of each prefix that it copies.
package main

import (
	"fmt"
	"os"

	record "kvtwinrecorder"
)

const (
	sequences = 2
	capacity  = 8
	layers    = 2
	heads     = 2
	headDim   = 2
)

type token struct {
	position int32
	key      [layers][heads * headDim]float32
	value    [layers][heads]float32
}

type toy struct {
	lists    [sequences][]token
	produced int // The number of tokens made so far.
	bug      bool
	recorder *record.Recorder
}

func (c *toy) copyPrefix(src, dst, length int) {
	kept := length
	if c.bug {
		kept--
	}
	c.lists[dst] = append([]token{}, c.lists[src][:kept]...)
	c.recorder.CopyPrefix(src, dst, int32(length))
}

// remove removes the tokens in [begin, end); later tokens move down, and
// "tag_add" shifts their K rows.
func (c *toy) remove(seq int, begin, end int32) {
	var kept []token
	for _, t := range c.lists[seq] {
		if t.position >= end {
			t.position -= end - begin
			for layer := range t.key {
				for k := range t.key[layer] {
					if k%headDim != 0 {
						t.key[layer][k] -= float32(end - begin)
					}
				}
			}
		} else if t.position >= begin {
			continue
		}
		kept = append(kept, t)
	}
	c.lists[seq] = kept
	c.recorder.Remove(seq, begin, end, "ok")
}

// get records the view that attention reads: all lists, one after the other.
func (c *toy) get(layer int, positions []int32, batch []int) {
	var key, value []float32
	n := len(c.lists[0]) + len(c.lists[1])
	sees := make([]bool, n*len(batch))
	column := 0
	for seq, list := range c.lists {
		for _, t := range list {
			key = append(key, t.key[layer][:]...)
			value = append(value, t.value[layer][:]...)
			for row := range batch {
				sees[row*n+column] = batch[row] == seq && t.position <= positions[row]
			}
			column++
		}
	}
	values := record.Dense(value, 1, heads, n)
	c.recorder.Get(layer, record.None, record.Dense(key, headDim, heads, n),
		&values, &record.Mask{Bool: sees, Columns: n, Rows: len(batch)})
}

// forward runs a forward pass: one token for each of these sequences.
func (c *toy) forward(batch ...int) {
	pass := record.Pass{Sequences: batch}
	lists, places := c.lists, make([]int, len(batch))
	for i, seq := range batch {
		places[i] = len(lists[seq])
		pass.Positions = append(pass.Positions, int32(places[i]))
		lists[seq] = append(lists[seq], token{position: int32(places[i])})
		if len(lists[seq]) > capacity {
			pass.Result = "cache_full"
		}
	}
	c.recorder.StartForward(pass)
	if pass.Result != "" {
		return
	}
	c.lists = lists
	for layer := 0; layer < layers; layer++ {
		var key, value []float32
		// Each token has different rows: its number, and its position.
		for i, seq := range batch {
			t := &c.lists[seq][places[i]]
			number := float32(100*(c.produced+i+1) + layer)
			for k := range t.key[layer] {
				t.key[layer][k] = number
				if k%headDim != 0 {
					t.key[layer][k] = 1000 + float32(t.position)
				}
			}
			for k := range t.value[layer] {
				t.value[layer][k] = number
			}
			key = append(key, t.key[layer][:]...)
			value = append(value, t.value[layer][:]...)
		}
		c.recorder.Put(layer, record.Dense(key, headDim, heads, len(batch)),
			record.Dense(value, 1, heads, len(batch)))
		c.get(layer, pass.Positions, batch)
	}
	c.produced += len(batch)
}

func run(path string, bug bool) error {
	recorder, err := record.Create(path, record.Header{
		Producer:     "a toy",
		Caches:       []record.Cache{{Shift: "tag_add"}},
		MaxSequences: sequences, Capacity: capacity, MaxBatch: capacity,
		Layers: layers, KHeadDim: headDim, KVHeads: heads, VHeadDim: 1,
	})
	if err != nil {
		return err
	}
	c := toy{bug: bug, recorder: recorder}
	c.forward(0, 0, 0)
	c.copyPrefix(0, 1, 2)
	c.forward(1, 0, 1)
	c.remove(0, 0, 1)
	c.forward(1, 0, 1)
	recorder.CanResume(0, 4, true)
	c.remove(1, 3, record.OpenEnd)
	c.forward(1)
	c.forward(0, 0, 0, 0, 0, 0, 0)
	return recorder.Close()
}

func main() {
	if len(os.Args) < 2 {
		os.Exit(2)
	}
	if err := run(os.Args[1], len(os.Args) > 2 && os.Args[2] == "--bug"); err != nil {
		fmt.Fprintln(os.Stderr, "example:", err)
		os.Exit(1)
	}
}
