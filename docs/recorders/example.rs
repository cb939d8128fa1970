//! A toy KV cache that records itself, and a program that uses it:
//!
//!     rustc --edition 2021 example.rs && ./example toy.jsonl
//!     kvtwin check toy.jsonl
//!
//! It has a list of tokens for each sequence, so its placement is "other". With
//! --bug it forgets the last token of each prefix that it copies.

mod kvtwin_recorder;

use kvtwin_recorder::{Cache, Header, Mask, Pass, Recorder, Tensor, OPEN_END};
use std::fs::File;
use std::io::Result;

const SEQUENCES: usize = 2;
const CAPACITY: usize = 8;
const LAYERS: usize = 2;
const HEADS: usize = 2;
const HEAD_DIM: usize = 2;

#[derive(Clone, Default)]
struct Token {
    position: i32,
    key: [[f32; HEADS * HEAD_DIM]; LAYERS],
    value: [[f32; HEADS]; LAYERS],
}

struct Toy {
    lists: [Vec<Token>; SEQUENCES],
    produced: usize, // Tokens of all sequences so far.
    bug: bool,
    recorder: Recorder<File>,
}

impl Toy {
    fn copy_prefix(&mut self, src: usize, dst: usize, len: usize) -> Result<()> {
        let kept = len - usize::from(self.bug);
        self.lists[dst] = self.lists[src][..kept].to_vec();
        self.recorder
            .copy_prefix(src as i32, dst as i32, len as i32)
    }

    /// Removes [begin, end); later tokens move down, as "tag_add" says.
    fn remove(&mut self, seq: usize, begin: i32, end: i32) -> Result<()> {
        self.lists[seq].retain(|t| t.position < begin || t.position >= end);
        for t in self.lists[seq].iter_mut().filter(|t| t.position >= end) {
            t.position -= end - begin;
            for row in &mut t.key {
                for k in (0..row.len()).filter(|k| k % HEAD_DIM != 0) {
                    row[k] -= (end - begin) as f32;
                }
            }
        }
        self.recorder.remove(seq as i32, begin, end, "ok")
    }

    /// Records the rows that attention reads: all lists, one after the other.
    fn get(&mut self, layer: usize, positions: &[i32], batch: &[i32]) -> Result<()> {
        let (mut key, mut value, mut sees) = (vec![], vec![], vec![]);
        for t in self.lists.iter().flatten() {
            key.extend(t.key[layer]);
            value.extend(t.value[layer]);
        }
        for (position, sequence) in positions.iter().zip(batch) {
            for (seq, list) in self.lists.iter().enumerate() {
                let same = seq as i32 == *sequence;
                sees.extend(list.iter().map(|t| same && t.position <= *position));
            }
        }
        let n = sees.len() / batch.len();
        self.recorder.get(
            layer as i32,
            None,
            Tensor::dense(&key, HEAD_DIM, HEADS, n),
            Some(Tensor::dense(&value, 1, HEADS, n)),
            Some(Mask::Bool {
                data: &sees,
                columns: n,
                rows: batch.len(),
            }),
        )
    }

    /// Runs a forward pass with one token for each of these sequences.
    fn forward(&mut self, batch: &[i32]) -> Result<()> {
        let (mut lists, mut positions) = (self.lists.clone(), vec![]);
        for seq in batch {
            let list = &mut lists[*seq as usize];
            let position = list.len() as i32;
            positions.push(position);
            list.push(Token {
                position,
                ..Token::default()
            });
        }
        let full = lists.iter().any(|list| list.len() > CAPACITY);
        self.recorder.start_forward(&Pass {
            positions: &positions,
            sequences: batch,
            result: if full { "cache_full" } else { "ok" },
            ..Pass::default()
        })?;
        if full {
            return Ok(());
        }
        self.lists = lists;
        for layer in 0..LAYERS {
            let (mut key, mut value) = (vec![], vec![]);
            // The rows of each token are its number and its position.
            for (i, seq) in batch.iter().enumerate() {
                let t = &mut self.lists[*seq as usize][positions[i] as usize];
                let number = (100 * (self.produced + i + 1) + layer) as f32;
                let position = 1000.0 + positions[i] as f32;
                t.key[layer] = [number, position, number, position];
                t.value[layer] = [number; HEADS];
                key.extend(t.key[layer]);
                value.extend(t.value[layer]);
            }
            self.recorder.put(
                layer as i32,
                Tensor::dense(&key, HEAD_DIM, HEADS, batch.len()),
                Tensor::dense(&value, 1, HEADS, batch.len()),
            )?;
            self.get(layer, &positions, batch)?;
        }
        self.produced += batch.len();
        Ok(())
    }
}

fn run(path: &str, bug: bool) -> Result<()> {
    let header = Header {
        producer: "a toy",
        caches: &[Cache {
            shift: "tag_add",
            ..Cache::default()
        }],
        max_sequences: SEQUENCES as i32,
        capacity: CAPACITY as i32,
        max_batch: CAPACITY as i32,
        layers: LAYERS as i32,
        k_head_dim: HEAD_DIM as i32,
        kv_heads: HEADS as i32,
        v_head_dim: 1,
        ..Header::default()
    };
    let mut toy = Toy {
        lists: Default::default(),
        produced: 0,
        bug,
        recorder: Recorder::create(path, &header)?,
    };
    toy.forward(&[0, 0, 0])?;
    toy.copy_prefix(0, 1, 2)?;
    toy.forward(&[1, 0, 1])?;
    toy.remove(0, 0, 1)?;
    toy.forward(&[1, 0, 1])?;
    toy.recorder.can_resume(0, 4, true)?;
    toy.remove(1, 3, OPEN_END)?;
    toy.forward(&[1])?;
    toy.forward(&[0; 7])?;
    toy.recorder.close()
}

fn main() {
    let arguments: Vec<String> = std::env::args().collect();
    if arguments.len() < 2 {
        std::process::exit(2);
    }
    let bug = arguments
        .get(2)
        .map_or(false, |argument| argument == "--bug");
    if let Err(error) = run(&arguments[1], bug) {
        eprintln!("example: {}", error);
        std::process::exit(1);
    }
}
