//! Records the calls to a KV cache and its answers, for `kvtwin check`. Copy
//! this file into your crate: it needs the standard library only.
//!
//! ```ignore
//! mod kvtwin_recorder;
//! use kvtwin_recorder::{Header, Mask, Pass, Recorder, Tensor};
//!
//! let mut r = Recorder::create("my.jsonl", &Header {
//!     producer: "my cache 1.2",
//!     max_sequences: 2, capacity: 64, max_batch: 8,
//!     layers: 1, k_head_dim: 64, kv_heads: 2, v_head_dim: 64,
//!     ..Header::default()
//! })?;
//!
//! let answer = cache.start_forward(...);
//! r.start_forward(&Pass {
//!     positions: &[0, 1, 2], sequences: &[0, 0, 0],
//!     result: if answer.is_ok() { "ok" } else { "cache_full" },
//!     ..Pass::default()
//! })?;
//! cache.put(0, &k, &v);
//! r.put(0, Tensor::dense(&k, 64, 2, 3), Tensor::dense(&v, 64, 2, 3))?;
//! let (k, v, mask) = cache.get(0);
//! let n = k.len() / (64 * 2);
//! r.get(0, None, Tensor::dense(k, 64, 2, n), Some(Tensor::dense(v, 64, 2, n)),
//!       Some(Mask::F32 { data: mask, columns: n, rows: 3 }))?;
//!
//! r.close()?;
//! ```
//!
//! An engine that does not show its rows, but what its attention made of them
//! (`attend_dtype: "bf16"`), has in place of the `get`:
//!
//! ```ignore
//! let out = cache.attend(0, &query);
//! r.attend(0, Tensor::dense(&query, 64, 8, 3), Tensor::dense(&out, 64, 8, 3))?;
//! ```
//!
//! Each function writes one line, after the recorded call has answered. It
//! returns an error if the line cannot be written. The first error stays:
//! nothing is written after it, and `close` returns it too. So `.ok()` may
//! replace each `?` but the first and the last. A line is handed to the system
//! at once: if your program crashes, all earlier lines are in the file.
//!
//! kvtwin's docs/trace_format.md explains the fields, which have the same names
//! here. Calls that your cache rejects as misuse are not recorded. This file
//! refuses only what cannot be written; `kvtwin check` says what else is wrong
//! with a recording, and in which line.
//!
//! Pools of blocks (`"type": "paged"`) are left out; that page has their lines,
//! too.

#![allow(dead_code)]

use std::fmt::{Display, Write as _};
use std::fs::File;
use std::io::{Error, ErrorKind, Result, Write};
use std::path::Path;

/// The open end of a range in `remove`.
pub const OPEN_END: i32 = i32::MAX;
/// The largest number of elements of one tensor.
pub const NUMBERS_MAX: usize = 64 << 20;

// In these structs, an empty field, or 0, stands for the default.

#[derive(Clone, Copy, Default)]
pub struct Cache<'a> {
    /// "causal", "swa", "swa_mem", "chunked", "encoder" or "recurrent"; default
    /// "causal".
    pub kind: &'a str,
    /// For swa and swa_mem: how many positions before its own a token sees. An
    /// engine whose window of n includes the token records n - 1. A negative
    /// window, memory or chunk is left out.
    pub window: i32,
    /// For swa_mem.
    pub memory: i32,
    /// For chunked.
    pub chunk: i32,
    /// "none", "identity", "add", "tag_add" or "rope"; default "none".
    pub shift: &'a str,
    /// For "rope" only, as are the fields below: "adjacent" or "halves";
    /// default "adjacent".
    pub rope_pairing: &'a str,
    /// Default 10000.
    pub rope_base: f64,
    /// Default 1.
    pub rope_scale: f64,
    pub rope_dims: i32,
    /// For recurrent, as are the fields below.
    pub checkpoint_every: i32,
    pub checkpoints: i32,
    pub pins: i32,
    pub drafts: i32,
}

#[derive(Clone, Copy, Default)]
pub struct Header<'a> {
    /// Free text.
    pub producer: &'a str,
    /// "contiguous", "scatter" or "other"; default "other".
    pub placement: &'a str,
    /// The cache; several are the caches of a wrapper. Default: one cache.
    pub caches: &'a [Cache<'a>],
    /// Several caches are those of a hybrid cache.
    pub hybrid: bool,
    /// Default 1.
    pub cache_padding: i32,
    /// Default 1.
    pub mask_batch_padding: i32,
    /// The layout of V in the views of `get`.
    pub permuted_v: bool,
    pub tiled_v: bool,
    /// "f32", "f16", "bf16" or "bits"; default "f32".
    pub mask_dtype: &'a str,
    /// One of the dtypes of `dtype`; default: the value of `dtype`.
    pub v_dtype: &'a str,
    /// "f32", "f16", "bf16", "f8_e4m3", "q8_0" or "q4_0"; default "f32".
    pub dtype: &'a str,
    pub max_sequences: i32,
    pub capacity: i32,
    pub max_batch: i32,
    pub layers: i32,
    pub k_head_dim: i32,
    pub kv_heads: i32,
    pub v_head_dim: i32,
    /// For `attend`: "f32", or the "f16" or "bf16" to which the engine rounds
    /// queries, scores, weights or outputs; default: there is no `attend`.
    pub attend_dtype: &'a str,
    /// The error of the cache's number formats.
    pub attend_tolerance: f64,
    /// Default: none.
    pub attend_soft_cap: f64,
    /// A logit for each query head; default: none.
    pub attend_sinks: &'a [f32],
    /// Passes have parents, and `commit` is called.
    pub drafts: bool,
    /// `find_prefix` or `checkpoint` is called.
    pub prompts: bool,
}

/// Rows as f32; convert rows of other dtypes, exactly. K is [k_head_dim,
/// kv_heads, n], V [v_head_dim, kv_heads, n], first dimension fastest; shape[3]
/// is 0 unless V is tiled. Strides are in elements; if all are 0, the tensor is
/// dense.
#[derive(Clone, Copy)]
pub struct Tensor<'a> {
    pub data: &'a [f32],
    pub shape: [usize; 4],
    pub stride: [usize; 4],
}

/// [columns, rows], columns fastest, dense: numbers that are 0 (may attend) or
/// -inf, or booleans that are true (may attend) or false.
#[derive(Clone, Copy)]
pub enum Mask<'a> {
    F32 {
        data: &'a [f32],
        columns: usize,
        rows: usize,
    },
    Bool {
        data: &'a [bool],
        columns: usize,
        rows: usize,
    },
}

/// The arguments and the answer of `start_forward`.
#[derive(Clone, Copy, Default)]
pub struct Pass<'a> {
    pub positions: &'a [i32],
    pub sequences: &'a [i32],
    pub reserve: bool,
    /// Batch indices, or none.
    pub multimodal: &'a [i32],
    /// "ok" or "cache_full"; default "ok".
    pub result: &'a str,
    /// The cell of each token, or None.
    pub cells: Option<&'a [i32]>,
    /// For each token: the number of the draft that a draft follows, -1 for the
    /// committed tokens, -2 for a token that is not a draft; none: no drafts.
    pub parents: &'a [i32],
}

/// Writes one recording.
pub struct Recorder<W: Write> {
    out: W,
    line: String,
    error: Option<(ErrorKind, String)>, // The first error.
}

impl<'a> Tensor<'a> {
    /// A dense tensor: the numbers lie one after the other.
    pub fn dense(data: &'a [f32], head_dim: usize, heads: usize, n: usize) -> Tensor<'a> {
        Tensor {
            data,
            shape: [head_dim, heads, n, 0],
            stride: [0; 4],
        }
    }

    /// Returns the shape, the strides, and the number of elements.
    fn extents(&self) -> std::result::Result<([usize; 4], [usize; 4], usize), String> {
        let (mut shape, mut stride, mut count) = (self.shape, self.stride, 1);
        shape[3] = shape[3].max(1);
        let dense = self.stride == [0; 4];
        for d in 0..4 {
            if shape[d] < 1 {
                return Err(format!("extent {} is 0, it must be 1 or more", d));
            }
            if shape[d] > NUMBERS_MAX / count {
                return Err(format!("more than {} numbers", NUMBERS_MAX));
            }
            if dense {
                stride[d] = count;
            }
            count *= shape[d];
        }
        if dense && count != self.data.len() {
            let numbers = self.data.len();
            return Err(format!(
                "{} numbers, of its shape there are {}",
                numbers, count
            ));
        }
        Ok((shape, stride, count))
    }
}

impl Recorder<File> {
    /// Records to a new file, which replaces an old file.
    pub fn create(path: impl AsRef<Path>, header: &Header) -> Result<Recorder<File>> {
        header.check()?;
        let path = path.as_ref();
        let file = File::create(path)
            .map_err(|error| Error::new(error.kind(), format!("{}: {}", path.display(), error)))?;
        Recorder::new(file, header)
    }
}

impl<W: Write> Recorder<W> {
    /// Records to your own writer: a pipe, memory (`&mut Vec<u8>`), or one that
    /// takes several recordings one after the other.
    pub fn new(out: W, header: &Header) -> Result<Recorder<W>> {
        header.check()?;
        let mut r = Recorder {
            out,
            line: String::new(),
            error: None,
        };
        r.header(header);
        r.end()?;
        Ok(r)
    }

    /// Returns the first error of all calls, a full disk included.
    pub fn close(mut self) -> Result<()> {
        if self.error.is_none() {
            return self.out.flush();
        }
        self.end()
    }

    pub fn start_forward(&mut self, pass: &Pass) -> Result<()> {
        self.op("start_forward");
        self.list("positions", pass.positions);
        self.list("sequences", pass.sequences);
        if !pass.parents.is_empty() {
            self.list("parents", pass.parents);
        }
        if pass.reserve {
            self.line += ",\"reserve\":true";
        }
        if !pass.multimodal.is_empty() {
            self.list("multimodal", pass.multimodal);
        }
        self.text_key("result", or(pass.result, "ok"));
        if let Some(cells) = pass.cells {
            self.list("cells", cells);
        }
        self.end()
    }

    pub fn set_causal(&mut self, except: &[i32]) -> Result<()> {
        self.op("set_causal");
        self.list("except", except);
        self.end()
    }

    pub fn set_layer_type(&mut self, kind: i32) -> Result<()> {
        self.op_of("set_layer_type", "type", kind);
        self.end()
    }

    pub fn put(&mut self, layer: i32, key: Tensor, value: Tensor) -> Result<()> {
        self.op_of("put", "layer", layer);
        self.tensor("put", "key", &key);
        self.tensor("put", "value", &value);
        self.end()
    }

    /// Records the view of a get. A first cell or V that is None is left out;
    /// an encoder has no mask.
    pub fn get(
        &mut self,
        layer: i32,
        first_cell: Option<i32>,
        key: Tensor,
        value: Option<Tensor>,
        mask: Option<Mask>,
    ) -> Result<()> {
        self.op_of("get", "layer", layer);
        self.limit("first_cell", first_cell.unwrap_or(-1));
        self.tensor("get", "key", &key);
        if let Some(value) = value {
            self.tensor("get", "value", &value);
        }
        match mask {
            Some(Mask::F32 {
                data,
                columns,
                rows,
            }) => self.mask(data, columns, rows, |x| match *x {
                x if x == 0.0 => Some('1'),
                x if x == f32::NEG_INFINITY => Some('0'),
                _ => None,
            }),
            Some(Mask::Bool {
                data,
                columns,
                rows,
            }) => self.mask(data, columns, rows, |x| Some(if *x { '1' } else { '0' })),
            None => self.line += ",\"mask\":null",
        }
        self.end()
    }

    /// Records what attention over the batch's pass answered: query
    /// [k_head_dim, heads, tokens], out [v_head_dim, heads, tokens].
    pub fn attend(&mut self, layer: i32, query: Tensor, out: Tensor) -> Result<()> {
        self.op_of("attend", "layer", layer);
        self.tensor("attend", "query", &query);
        self.tensor("attend", "out", &out);
        self.end()
    }

    /// Records the view of a reserving pass. The first cell is as in `get`.
    pub fn reserved_mask(
        &mut self,
        columns: i32,
        rows: i32,
        first_cell: Option<i32>,
    ) -> Result<()> {
        self.op("reserved_mask");
        self.list("shape", &[columns, rows]);
        self.limit("first_cell", first_cell.unwrap_or(-1));
        self.end()
    }

    /// `result`: "ok", "not_supported" or "shared_cells"; default "ok".
    pub fn remove(&mut self, seq: i32, begin: i32, end: i32, result: &str) -> Result<()> {
        self.op_of("remove", "seq", seq);
        self.field("begin", begin);
        self.field("end", end);
        self.text_key("result", or(result, "ok"));
        self.end()
    }

    pub fn copy_prefix(&mut self, src: i32, dst: i32, len: i32) -> Result<()> {
        self.op_of("copy_prefix", "src", src);
        self.field("dst", dst);
        self.field("len", len);
        self.end()
    }

    /// The drafts with these numbers become tokens, the others are gone.
    pub fn commit(&mut self, seq: i32, path: &[i32]) -> Result<()> {
        self.op_of("commit", "seq", seq);
        self.list("path", path);
        self.end()
    }

    /// `ids` is the prompt of a sequence without tokens, which begins with
    /// `len` of them.
    pub fn find_prefix(&mut self, seq: i32, ids: &[i32], len: i32) -> Result<()> {
        self.op_of("find_prefix", "seq", seq);
        self.list("tokens", ids);
        self.field("len", len);
        self.end()
    }

    pub fn checkpoint(&mut self, seq: i32) -> Result<()> {
        self.op_of("checkpoint", "seq", seq);
        self.end()
    }

    pub fn can_resume(&mut self, seq: i32, pos: i32, result: bool) -> Result<()> {
        self.op_of("can_resume", "seq", seq);
        self.field("pos", pos);
        self.field("result", result);
        self.end()
    }

    pub fn encoder_cached(&mut self, result: bool) -> Result<()> {
        self.op("encoder_cached");
        self.field("result", result);
        self.end()
    }

    fn op_of(&mut self, op: &str, key: &str, number: i32) {
        self.op(op);
        self.field(key, number);
    }

    fn op(&mut self, name: &str) {
        self.line = format!("{{\"op\":\"{}\"", name);
    }

    fn fail(&mut self, message: String) {
        if self.error.is_none() {
            self.error = Some((ErrorKind::InvalidInput, message));
        }
    }

    /// Writes the line, unless there was an error.
    fn end(&mut self) -> Result<()> {
        if self.error.is_none() {
            self.line += "}\n";
            if let Err(error) = self.out.write_all(self.line.as_bytes()) {
                self.error = Some((error.kind(), error.to_string()));
            }
        }
        match &self.error {
            Some((kind, message)) => Err(Error::new(*kind, message.clone())),
            None => Ok(()),
        }
    }

    fn field(&mut self, key: &str, value: impl Display) {
        let _ = write!(self.line, ",\"{}\":{}", key, value);
    }

    fn text(&mut self, text: &str) {
        self.line.push('"');
        for c in text.chars() {
            if c < ' ' {
                let _ = write!(self.line, "\\u{:04x}", c as u32);
                continue;
            }
            if c == '"' || c == '\\' {
                self.line.push('\\');
            }
            self.line.push(c);
        }
        self.line.push('"');
    }

    fn text_key(&mut self, key: &str, text: &str) {
        self.field(key, "");
        self.text(text);
    }

    /// Leaves out a negative number.
    fn limit(&mut self, key: &str, number: i32) {
        if number >= 0 {
            self.field(key, number);
        }
    }

    fn list(&mut self, key: &str, numbers: &[i32]) {
        self.field(key, "[");
        for (i, number) in numbers.iter().enumerate() {
            let _ = write!(self.line, "{}{}", if i == 0 { "" } else { "," }, number);
        }
        self.line.push(']');
    }

    fn tensor(&mut self, call: &str, name: &str, tensor: &Tensor) {
        let (shape, stride, count) = match tensor.extents() {
            Ok(extents) => extents,
            Err(what) => return self.fail(format!("{}: {}: {}", call, name, what)),
        };
        if self.error.is_some() {
            return;
        }
        let rank = if tensor.shape[3] == 0 { 3 } else { 4 };
        let shape_text: Vec<String> = shape[..rank].iter().map(usize::to_string).collect();
        self.field(name, "{\"shape\":[");
        self.line += &shape_text.join(",");
        self.line += "],\"data\":[";
        for i in 0..count {
            let (mut offset, mut rest) = (0usize, i);
            for d in 0..4 {
                offset = offset.saturating_add((rest % shape[d]).saturating_mul(stride[d]));
                rest /= shape[d];
            }
            let what = match tensor.data.get(offset) {
                Some(number) if number.is_finite() => {
                    self.line += if i == 0 { "" } else { "," };
                    self.line += &number_text((*number).into(), 9);
                    continue;
                }
                Some(_) => "is not finite, which no recording can hold",
                None => "lies outside of its data",
            };
            return self.fail(format!("{}: {}: element {} {}", call, name, i, what));
        }
        self.line += "]}";
    }

    fn mask<T>(&mut self, data: &[T], columns: usize, rows: usize, sees: fn(&T) -> Option<char>) {
        if columns < 1 || rows < 1 || rows > NUMBERS_MAX / columns {
            return self.fail(format!(
                "get: mask has {} columns and {} rows",
                columns, rows
            ));
        }
        if data.len() != columns * rows {
            let (have, need) = (data.len(), columns * rows);
            return self.fail(format!(
                "get: mask: {} elements, of its shape there are {}",
                have, need
            ));
        }
        let _ = write!(
            self.line,
            ",\"mask\":{{\"shape\":[{},{}],\"rows\":[\"",
            columns, rows
        );
        for (i, x) in data.iter().enumerate() {
            if i > 0 && i % columns == 0 {
                self.line += "\",\"";
            }
            match sees(x) {
                Some(c) => self.line.push(c),
                None => {
                    return self.fail(format!("get: mask: element {} is neither 0 nor -inf", i))
                }
            }
        }
        self.line += "\"]}";
    }

    fn cache(&mut self, cache: &Cache) {
        let (kind, shift) = (or(cache.kind, "causal"), or(cache.shift, "none"));
        self.line += "{\"type\":";
        self.text(kind);
        if kind.starts_with("swa") {
            self.limit("window", cache.window);
        }
        if kind == "swa_mem" {
            self.limit("memory", cache.memory);
        }
        if kind == "chunked" {
            self.limit("chunk", cache.chunk);
        }
        if kind == "recurrent" {
            self.field("checkpoint_every", cache.checkpoint_every);
            self.field("checkpoints", cache.checkpoints);
            self.field("pins", cache.pins);
            self.field("drafts", cache.drafts);
        } else if kind != "encoder" {
            self.text_key("shift", shift);
        }
        if shift == "rope" {
            self.line += ",\"rope\":{\"pairing\":";
            self.text(or(cache.rope_pairing, "adjacent"));
            let or_number = |x: f64, other| number_text(if x == 0.0 { other } else { x }, 17);
            self.field("base", or_number(cache.rope_base, 10000.0));
            self.field("scale", or_number(cache.rope_scale, 1.0));
            self.field("dims", cache.rope_dims);
            self.line.push('}');
        }
        self.line.push('}');
    }

    fn header(&mut self, header: &Header) {
        let one = [Cache::default()];
        let caches = if header.caches.is_empty() {
            &one
        } else {
            header.caches
        };
        let attends = !header.attend_dtype.is_empty();
        self.line += "{\"kvtrace\":";
        self.line += match (header.prompts, header.drafts, attends) {
            (true, _, _) => "4",
            (_, true, _) => "3",
            (_, _, true) => "2",
            _ => "1",
        };
        self.line += ",\"producer\":";
        self.text(header.producer);
        self.text_key("placement", or(header.placement, "other"));
        self.field(
            "cache",
            match (caches.len() > 1, header.hybrid) {
                (true, true) => "{\"type\":\"hybrid\",\"caches\":[",
                (true, false) => "{\"type\":\"wrapper\",\"caches\":[",
                (false, _) => "",
            },
        );
        for (i, cache) in caches.iter().enumerate() {
            self.line += if i == 0 { "" } else { "," };
            self.cache(cache);
        }
        self.line += if caches.len() > 1 { "]}" } else { "" };
        let or_one = |padding: i32| if padding == 0 { 1 } else { padding };
        self.line += ",\"config\":{\"cache_padding\":";
        self.line += &or_one(header.cache_padding).to_string();
        self.field("mask_batch_padding", or_one(header.mask_batch_padding));
        self.field("permuted_v", header.permuted_v);
        self.field("tiled_v", header.tiled_v);
        self.text_key("mask_dtype", or(header.mask_dtype, "f32"));
        if !header.v_dtype.is_empty() {
            self.text_key("v_dtype", header.v_dtype);
        }
        self.line += "},\"init\":{\"dtype\":";
        self.text(or(header.dtype, "f32"));
        self.field("max_sequences", header.max_sequences);
        self.field("capacity", header.capacity);
        self.field("max_batch", header.max_batch);
        self.line += "},\"model\":{\"layers\":";
        self.line += &header.layers.to_string();
        self.field("k_head_dim", header.k_head_dim);
        self.field("kv_heads", header.kv_heads);
        self.field("v_head_dim", header.v_head_dim);
        self.line.push('}');
        if attends {
            self.line += ",\"attend\":{\"dtype\":";
            self.text(header.attend_dtype);
            self.field("tolerance", number_text(header.attend_tolerance, 17));
            self.field("soft_cap", number_text(header.attend_soft_cap, 17));
            let sinks = header.attend_sinks.iter();
            let sinks: Vec<String> = sinks.map(|x| number_text((*x).into(), 9)).collect();
            self.field("sinks", format!("[{}]", sinks.join(",")));
            self.line.push('}');
        }
    }
}

impl Header<'_> {
    fn check(&self) -> Result<()> {
        let wrong = |message: String| Err(Error::new(ErrorKind::InvalidInput, message));
        for (name, size) in [
            ("max_sequences", self.max_sequences),
            ("capacity", self.capacity),
            ("max_batch", self.max_batch),
            ("layers", self.layers),
            ("k_head_dim", self.k_head_dim),
            ("kv_heads", self.kv_heads),
            ("v_head_dim", self.v_head_dim),
        ] {
            if size < 1 {
                return wrong(format!(
                    "header: {} is {}, it must be 1 or more",
                    name, size
                ));
            }
        }
        for cache in self.caches {
            if !cache.rope_base.is_finite() || !cache.rope_scale.is_finite() {
                return wrong("header: rope_base or rope_scale is not finite".to_string());
            }
        }
        let mut finite = self.attend_sinks.iter().all(|sink| sink.is_finite());
        finite &= (self.attend_tolerance + self.attend_soft_cap).is_finite();
        if !finite {
            return wrong("header: a number for attend is not finite".to_string());
        }
        Ok(())
    }
}

fn or<'a>(text: &'a str, other: &'a str) -> &'a str {
    if text.is_empty() {
        other
    } else {
        text
    }
}

/// Formats as "%.9g" of C, with this many digits: the text reads back as the
/// same number.
fn number_text(number: f64, digits: usize) -> String {
    let cut = |text: &str| match text.contains('.') {
        true => text.trim_end_matches('0').trim_end_matches('.').to_string(),
        false => text.to_string(),
    };
    let text = format!("{:.*e}", digits - 1, number);
    let (mantissa, exponent) = text.split_once('e').unwrap_or((&text, "0"));
    let exponent: i32 = exponent.parse().unwrap_or(0);
    let last = digits as i32 - 1;
    if exponent < -4 || exponent > last {
        let sign = if exponent < 0 { '-' } else { '+' };
        return format!("{}e{}{:02}", cut(mantissa), sign, exponent.abs());
    }
    cut(&format!("{:.*}", (last - exponent) as usize, number))
}
