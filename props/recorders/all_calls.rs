//! all_calls FOLDER: as all_calls.c, in Rust.

mod kvtwin_recorder;

use kvtwin_recorder::{Cache, Header, Mask, Pass, Recorder, Tensor, OPEN_END};
use std::fs::File;
use std::io::{Result, Write};

const MANY: usize = 65536;
const FEW: usize = 512;

const SIZES: Header = Header {
    producer: "all calls",
    placement: "",
    caches: &[],
    cache_padding: 0,
    mask_batch_padding: 0,
    permuted_v: false,
    tiled_v: false,
    mask_dtype: "",
    v_dtype: "",
    dtype: "",
    max_sequences: 1,
    capacity: 8,
    max_batch: 2,
    layers: 1,
    k_head_dim: 2,
    kv_heads: 1,
    v_head_dim: 1,
    attend_dtype: "",
    attend_tolerance: 0.0,
    attend_soft_cap: 0.0,
    attend_sinks: &[],
    drafts: false,
    hybrid: false,
    prompts: false,
};

/// Zeros, the ends of ranges, ties in the ninth digit, powers of ten at which
/// the form changes; then any bits.
fn numbers(count: usize) -> Vec<f32> {
    let special: [u32; 24] = [
        0x00000000, 0x80000000, 0x00000001, 0x807fffff, 0x00800000, 0x7f7fffff, 0xff7fffff,
        0x39000000, 0x38800000, 0x39c00000, 0x3a600000, 0x3dcccccd, 0x3f800001, 0x4b800000,
        0x4cbebc1f, 0x4cbebc20, 0x4e6e6b27, 0x4e6e6b28, 0x38d1b716, 0x38d1b717, 0x3727c5ac,
        0x501502f9, 0x42c80000, 0x461c4000,
    ];
    let mut bits = 1u32;
    let mut next = || loop {
        bits = bits.wrapping_mul(1664525).wrapping_add(1013904223);
        if bits & 0x7f800000 != 0x7f800000 {
            return bits;
        }
    };
    let any: Vec<u32> = (0..count).map(|_| next()).collect();
    let first = special.iter().chain(any.iter().skip(special.len()));
    first.map(|bits| f32::from_bits(*bits)).collect()
}

fn record_encoder(out: &mut File) -> Result<()> {
    let row = [1.5, -2.0];
    let (key, value) = (Tensor::dense(&row, 2, 1, 1), Tensor::dense(&row, 1, 1, 2));
    let cache = Cache {
        kind: "encoder",
        ..Cache::default()
    };
    let header = Header {
        caches: &[cache],
        ..SIZES
    };
    let mut r = Recorder::new(out, &header)?;
    r.start_forward(&Pass {
        positions: &[0],
        sequences: &[0],
        multimodal: &[0],
        result: "ok",
        ..Pass::default()
    })?;
    r.put(0, key, value)?;
    r.encoder_cached(true)?;
    r.get(0, None, key, Some(value), None)?;
    r.remove(0, 0, OPEN_END, "")?;
    r.encoder_cached(false)?;
    r.close()
}

fn record_causal(out: &mut File) -> Result<()> {
    let hide = f32::NEG_INFINITY;
    // Two elements of a row, one of another purpose, and so on.
    let rows = [
        1.0, 2.0, 99.0, 3.0, 4.0, 99.0, 0.0, 0.0, 99.0, 0.0, 0.0, 99.0,
    ];
    let values = [5.0, 6.0, -0.0, 0.0];
    let mut numbers = [hide; 16];
    numbers[0] = 0.0;
    numbers[1] = -0.0;
    numbers[4..6].fill(0.0);
    let mask = Mask::F32 {
        data: &numbers,
        columns: 4,
        rows: 4,
    };
    let mut key = Tensor {
        data: &rows,
        shape: [2, 1, 2, 0],
        stride: [1, 3, 3, 0],
    };
    let header = Header {
        producer: "quote \" backslash \\ tab \t, \u{e9}",
        placement: "contiguous",
        caches: &[Cache {
            shift: "identity",
            ..Cache::default()
        }],
        cache_padding: 4,
        mask_batch_padding: 4,
        permuted_v: true,
        mask_dtype: "bits",
        dtype: "f16",
        v_dtype: "f32",
        ..SIZES
    };
    let mut r = Recorder::new(out, &header)?;
    let mut pass = Pass {
        positions: &[0, 1],
        sequences: &[0, 0],
        reserve: true,
        ..Pass::default()
    };
    r.start_forward(&pass)?;
    r.reserved_mask(8, 4, Some(0))?;
    pass.reserve = false;
    pass.cells = Some(&[0, 1]);
    r.start_forward(&pass)?;
    r.set_causal(&[0])?;
    r.put(0, key, Tensor::dense(&values[..2], 1, 1, 2))?;
    key.shape[2] = 4;
    let value = Tensor::dense(&values, 4, 1, 1);
    r.get(0, Some(0), key, Some(value), Some(mask))?;
    r.get(0, None, key, None, Some(mask))?;
    r.can_resume(0, 2, true)?;
    r.copy_prefix(0, 1, 1)?;
    r.remove(1, 0, 1, "ok")?;
    r.remove(0, 0, 1, "ok")?;
    r.close()
}

/// With a tensor of four dimensions, of one tile of V.
fn record_wrapper(out: &mut File) -> Result<()> {
    let (mut tile, mut keys, mut sees) = ([0.0; 32], [0.0; 64], [false; 32]);
    let swa_mem = Cache {
        kind: "swa_mem",
        window: -1,
        memory: -1,
        ..Cache::default()
    };
    let header = Header {
        placement: "scatter",
        tiled_v: true,
        cache_padding: 32,
        caches: &[
            Cache {
                kind: "swa",
                shift: "rope",
                ..Cache::default()
            },
            Cache {
                kind: "chunked",
                chunk: 2,
                ..Cache::default()
            },
            Cache {
                window: 1,
                memory: 3,
                shift: "rope",
                rope_pairing: "halves",
                rope_base: 1e6,
                rope_scale: 0.1,
                rope_dims: 2,
                ..swa_mem
            },
            swa_mem,
        ],
        ..SIZES
    };
    let mut r = Recorder::new(out, &header)?;
    r.start_forward(&Pass {
        positions: &[0],
        sequences: &[0],
        ..Pass::default()
    })?;
    r.set_layer_type(1)?;
    keys[..2].copy_from_slice(&[7.0, 8.0]);
    tile[0] = 9.0;
    sees[0] = true;
    let (key, value) = (Tensor::dense(&keys[..2], 2, 1, 1), &tile[..1]);
    r.put(0, key, Tensor::dense(value, 1, 1, 1))?;
    let value = Tensor {
        data: &tile,
        shape: [32, 1, 1, 1],
        stride: [0; 4],
    };
    let mask = Mask::Bool {
        data: &sees,
        columns: 32,
        rows: 1,
    };
    let key = Tensor::dense(&keys, 2, 1, 32);
    r.get(0, Some(0), key, Some(value), Some(mask))?;
    r.close()
}

/// A window of one position, and a sink of the second head. Of two tokens that
/// a row sees, one has all of the weight that the sink leaves, or the sink has
/// all. With `wrong_one`, the last head of the last row sees the first token,
/// too.
fn record_attention(out: &mut File, wrong_one: bool) -> Result<()> {
    let (keys, values) = ([1.0, 0.0, 0.0, 1.0, 1.0, 1.0], [1.0, 3.0, 8.0]);
    let (a, b) = (9999.0, -9999.0);
    let queries = [0.0, 0.0, 0.0, 0.0, 0.0, a, a, 0.0, b, 0.0, 0.0, b];
    let outputs = [0.9375, 0.5, 3.0, 1.0, 3.0, if wrong_one { 0.5 } else { 0.0 }];
    let header = Header {
        caches: &[Cache {
            kind: "swa",
            window: 1,
            ..Cache::default()
        }],
        max_batch: 3,
        attend_dtype: "f32",
        attend_tolerance: 0.1,
        attend_soft_cap: 1e6,
        attend_sinks: &[-9999.5, 0.0],
        ..SIZES
    };
    let mut r = Recorder::new(out, &header)?;
    r.start_forward(&Pass {
        positions: &[0, 1, 2],
        sequences: &[0, 0, 0],
        ..Pass::default()
    })?;
    let (key, value) = (Tensor::dense(&keys, 2, 1, 3), &values);
    r.put(0, key, Tensor::dense(value, 1, 1, 3))?;
    let query = Tensor::dense(&queries, 2, 2, 3);
    r.attend(0, query, Tensor::dense(&outputs, 1, 2, 3))?;
    r.close()
}

/// A hybrid cache whose second part has recurrent state. A later sequence begins
/// with two tokens of the first one.
fn record_hybrid(out: &mut File) -> Result<()> {
    let (rows, values) = ([1.0, 2.0, 3.0, 4.0, 5.0, 6.0], [7.0, 8.0, 9.0]);
    let sees = [true, false, true, true, true, true];
    let mask = |begin: usize, columns: usize, rows: usize| Mask::Bool {
        data: &sees[begin..begin + columns * rows],
        columns,
        rows,
    };
    let recurrent = Cache {
        kind: "recurrent",
        checkpoint_every: 1,
        checkpoints: 2,
        pins: 1,
        ..Cache::default()
    };
    let header = Header {
        caches: &[Cache::default(), recurrent],
        hybrid: true,
        prompts: true,
        ..SIZES
    };
    let mut r = Recorder::new(out, &header)?;
    r.find_prefix(0, &[7, 8], 0)?;
    r.start_forward(&Pass {
        positions: &[0, 1],
        sequences: &[0, 0],
        ..Pass::default()
    })?;
    r.set_layer_type(0)?;
    let key = Tensor::dense(&rows[..4], 2, 1, 2);
    let value = Tensor::dense(&values[..2], 1, 1, 2);
    r.put(0, key, value)?;
    r.get(0, None, key, Some(value), Some(mask(0, 2, 2)))?;
    r.set_layer_type(1)?;
    r.put(0, key, value)?;
    r.checkpoint(0)?;
    r.remove(0, 0, OPEN_END, "")?;
    r.find_prefix(0, &[7, 8, 9], 2)?;
    r.start_forward(&Pass {
        positions: &[2],
        sequences: &[0],
        ..Pass::default()
    })?;
    r.set_layer_type(0)?;
    let added = Tensor::dense(&rows[4..], 2, 1, 1);
    r.put(0, added, Tensor::dense(&values[2..], 1, 1, 1))?;
    let key = Tensor::dense(&rows, 2, 1, 3);
    let value = Tensor::dense(&values, 1, 1, 3);
    r.get(0, None, key, Some(value), Some(mask(2, 3, 1)))?;
    r.set_layer_type(1)?;
    let key = Tensor::dense(&rows[2..4], 2, 1, 1);
    let value = Tensor::dense(&values[1..2], 1, 1, 1);
    r.get(0, None, key, Some(value), Some(mask(0, 1, 1)))?;
    r.close()
}

/// Two drafts of one position, of which the second is committed.
fn record_drafts(out: &mut File) -> Result<()> {
    let (rows, values) = ([1.0, 2.0, 3.0, 4.0, 5.0, 6.0], [7.0, 8.0, 9.0]);
    let header = Header {
        drafts: true,
        ..SIZES
    };
    let mut r = Recorder::new(out, &header)?;
    r.start_forward(&Pass {
        positions: &[0, 0],
        sequences: &[0, 0],
        parents: &[-1, -1],
        ..Pass::default()
    })?;
    let key = Tensor::dense(&rows[..4], 2, 1, 2);
    let value = Tensor::dense(&values[..2], 1, 1, 2);
    r.put(0, key, value)?;
    let sees = Mask::Bool {
        data: &[true, false, false, true],
        columns: 2,
        rows: 2,
    };
    r.get(0, None, key, Some(value), Some(sees))?;
    r.commit(0, &[1])?;
    r.start_forward(&Pass {
        positions: &[1],
        sequences: &[0],
        ..Pass::default()
    })?;
    let added = Tensor::dense(&rows[4..], 2, 1, 1);
    r.put(0, added, Tensor::dense(&values[2..], 1, 1, 1))?;
    let key = Tensor::dense(&rows[2..], 2, 1, 2);
    let value = Tensor::dense(&values[1..], 1, 1, 2);
    let sees = Mask::Bool {
        data: &[true, true],
        columns: 2,
        rows: 1,
    };
    r.get(0, None, key, Some(value), Some(sees))?;
    r.close()
}

fn record_numbers(out: &mut impl Write, count: usize) -> Result<()> {
    let made = numbers(count);
    let header = Header {
        k_head_dim: count as i32,
        ..SIZES
    };
    let mut r = Recorder::new(out, &header)?;
    r.start_forward(&Pass {
        positions: &[0],
        sequences: &[0],
        ..Pass::default()
    })?;
    let value = Tensor::dense(&made[..1], 1, 1, 1);
    r.put(0, Tensor::dense(&made, count, 1, 1), value)?;
    r.close()
}

/// The first list of data that was written has the same numbers, bit by bit.
fn read_back(count: usize) -> Result<()> {
    let mut bytes = vec![];
    record_numbers(&mut bytes, count)?;
    let text = String::from_utf8(bytes).unwrap();
    let list = text.split("\"data\":[").nth(1).unwrap();
    let list = list.split(']').next().unwrap();
    let read: Vec<u32> = list
        .split(',')
        .map(|number| number.parse::<f32>().unwrap().to_bits())
        .collect();
    let made: Vec<u32> = numbers(count).iter().map(|x| x.to_bits()).collect();
    assert!(read == made, "a number reads back as another one");
    Ok(())
}

/// One call that cannot be recorded; returns what is said of it.
fn refused(call: impl Fn(&mut Recorder<&mut Vec<u8>>) -> Result<()>) -> String {
    let mut nothing = vec![];
    Recorder::new(&mut nothing, &SIZES).unwrap();
    let mut bytes = vec![];
    let mut r = Recorder::new(&mut bytes, &SIZES).unwrap();
    let message = call(&mut r).unwrap_err().to_string();
    assert!(r.can_resume(0, 0, true).is_err());
    assert_eq!(r.close().unwrap_err().to_string(), message);
    assert_eq!(bytes, nothing, "something is written in spite of an error");
    message
}

fn write_refusals(out: &mut File) -> Result<()> {
    let good = [1.0, 2.0, 3.0, 4.0];
    let (with_nan, with_inf) = ([1.0, f32::NAN, 3.0, 4.0], [1.0, 2.0, 3.0, f32::INFINITY]);
    let g = Tensor::dense(&good, 2, 1, 2);
    let n = Tensor::dense(&with_nan, 2, 1, 2);
    let i = Tensor::dense(&with_inf, 2, 1, 2);
    let none = Tensor::dense(&good, 2, 0, 2);
    let large = Tensor::dense(&good, 1 << 40, 1 << 40, 1 << 40);
    let put = |key: Tensor, value: Tensor| refused(|r| r.put(0, key, value));
    let get = |key: Tensor, value: Tensor, mask: Option<Mask>| {
        refused(|r| r.get(0, Some(0), key, Some(value), mask))
    };
    let mask = |data: &[f32], columns, rows| {
        get(
            g,
            g,
            Some(Mask::F32 {
                data,
                columns,
                rows,
            }),
        )
    };
    writeln!(out, "{}", put(n, g))?;
    writeln!(out, "{}", put(g, i))?;
    writeln!(out, "{}", get(i, g, None))?;
    writeln!(out, "{}", get(g, n, None))?;
    writeln!(out, "{}", put(none, g))?;
    writeln!(out, "{}", put(g, large))?;
    writeln!(out, "{}", mask(&good, 0, 2))?;
    writeln!(out, "{}", mask(&[0.0, 0.5], 2, 1))?;
    writeln!(out, "{}", mask(&[f32::INFINITY, 0.0], 2, 1))?;
    writeln!(out, "{}", mask(&[0.0, f32::NAN], 1, 2))?;
    writeln!(out, "{}", refused(|r| r.attend(0, n, g)))?;
    writeln!(out, "{}", refused(|r| r.attend(0, g, i)))?;
    let headless = Header {
        kv_heads: 0,
        ..SIZES
    };
    let cache = Cache {
        rope_scale: f64::NAN,
        ..Cache::default()
    };
    let no_scale = Header {
        caches: &[cache],
        ..SIZES
    };
    let no_sink = Header {
        attend_sinks: &[1.0, f32::NAN],
        ..SIZES
    };
    for header in [headless, no_scale, no_sink] {
        let error = Recorder::new(vec![], &header).err().unwrap();
        writeln!(out, "{}", error)?;
    }

    // Calls that C cannot check.
    put(Tensor::dense(&good[..3], 2, 1, 2), g);
    for last in [3, usize::MAX] {
        let outside = Tensor {
            data: &good,
            shape: [2, 1, 2, 0],
            stride: [1, 1, last, 0],
        };
        put(outside, g);
    }
    mask(&good, 3, 1);
    let error = Recorder::create("/no/such/folder/file", &SIZES).err().unwrap();
    assert!(error.to_string().contains("/no/such/folder/file"));
    Ok(())
}

fn main() -> Result<()> {
    let folder = std::env::args().nth(1).unwrap();
    let mut out = File::create(folder.clone() + "/all_calls.jsonl")?;
    record_encoder(&mut out)?;
    record_causal(&mut out)?;
    record_wrapper(&mut out)?;
    record_attention(&mut out, false)?;
    record_drafts(&mut out)?;
    record_hybrid(&mut out)?;
    record_numbers(&mut out, FEW)?;
    let mut wrong = File::create(folder.clone() + "/wrong_attention.jsonl")?;
    record_attention(&mut wrong, true)?;
    write_refusals(&mut File::create(folder + "/refused.txt")?)?;
    read_back(MANY)
}
