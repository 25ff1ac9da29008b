//! Files like those of `torch.save`, made by hand: valid and invalid pickles.
#![allow(clippy::unwrap_used)] // a failed test may panic
use candle_core::{DType, Tensor};
use candle_ddp_pickle::Error;
use candle_ddp_testing::torch_file::{
    archive, dict, floats_of, global, pickle, replace, storage, tensor, text, untyped,
};
use candle_ddp_testing::{assert_error, floats, peak_memory, test_process};
use std::collections::HashMap;
use std::fs::File;
use std::io::{Cursor, Write};

/// The tensors of a file, if all can be read.
fn read_file(file: &[u8]) -> Result<HashMap<String, Tensor>, Error> {
    let tensors = candle_ddp_pickle::read(Cursor::new(file), None)?;
    let of = |(name, tensor): (String, Result<Tensor, String>)| match tensor {
        Ok(tensor) => Ok((name, tensor)),
        Err(reason) => Err(Error::File(format!("{name}: {reason}"))),
    };
    tensors.into_iter().map(of).collect()
}

fn read(value: &[u8]) -> Result<HashMap<String, Tensor>, Error> {
    read_file(&archive(&pickle(value), &storage()))
}

#[test]
fn pickles_are_checked() {
    let read = |class: &str, offset, shape: &[i32], strides: &[i32]| {
        read(&dict(&[("w", &tensor(class, offset, shape, strides, b""))]))
            .map(|mut tensors| tensors.remove("w").unwrap())
    };
    let values = |offset, shape: &[i32], strides: &[i32]| {
        let tensor = read("FloatStorage", offset, shape, strides).unwrap();
        let dims: Vec<i32> = tensor.dims().iter().map(|dim| *dim as i32).collect();
        assert_eq!(dims, shape);
        floats(&tensor)
    };
    assert_eq!(values(0, &[2, 2], &[2, 1]), [0., 1., 2., 3.]);
    assert_eq!(values(0, &[2, 2], &[1, 2]), [0., 2., 1., 3.]);
    assert_eq!(values(1, &[2], &[2]), [1., 3.]);
    assert_eq!(values(1, &[3, 2], &[1, 0]), [1., 1., 2., 2., 3., 3.]);
    assert_eq!(values(3, &[], &[]), [3.]);
    assert_eq!(values(3, &[1, 1], &[7, 9]), [3.]);
    assert_eq!(values(0, &[0, 1000], &[1, 1]).len(), 0);
    assert_eq!(read("BoolStorage", 2, &[1], &[1]).unwrap().dtype(), DType::U8);
    let error = |class: &str, offset, shape: &[i32], strides: &[i32], words: &str| {
        assert_error(read(class, offset, shape, strides), &["w: ", words])
    };
    error("FloatStorage", 1, &[2, 2], &[2, 1], "outside");
    error("FloatStorage", i32::MAX, &[1], &[1], "outside");
    error("FloatStorage", 0, &[2, 2], &[i32::MAX, 1], "outside");
    error("FloatStorage", 0, &[i32::MAX; 3], &[0; 3], "larger than the file");
    error("FloatStorage", 0, &[1000], &[0], "larger than the file");
    error("FloatStorage", 0, &[0, i32::MAX, i32::MAX, i32::MAX], &[1; 4], "larger than the file");
    error("FloatStorage", -1, &[1], &[1], "damaged");
    error("FloatStorage", 0, &[1, 1], &[1], "damaged");
    error("ComplexFloatStorage", 0, &[1], &[1], "ComplexFloatStorage");
    let pickle = |bytes: &[u8], words: &str| assert_error(read_file(&archive(bytes, &[])), &[words]);
    pickle(b"\x80\x02cnet\nNet\n)\x81}b.", "net.Net");
    pickle(b"\x80\x02].", "a list");
    pickle(b"\x80\x02}X\x05\0\0\0epochK\x03s.", "epoch");
    pickle(b"\x80\x02}X\x01\0\0\0wctorch._utils\n_rebuild_sparse_tensor\n)Rs.", "_rebuild_sparse_tensor");
    pickle(b"\x80\x02", "ends too early");
    pickle(b"\x80\x04\x95", "protocol 4");
    let mut other = zip::ZipWriter::new(Cursor::new(Vec::new()));
    let stored = zip::write::SimpleFileOptions::default().compression_method(zip::CompressionMethod::Stored);
    other.start_file("readme.txt", stored).unwrap();
    assert_error(read_file(other.finish().unwrap().get_ref()), &["no data.pkl"]);
}

/// PyTorch writes the storage of a tensor that is negated or conjugated later, and says so.
#[test]
fn lazily_negated_tensors_are_refused() {
    let with = |metadata: &[u8]| read(&dict(&[("w", &tensor("FloatStorage", 0, &[2], &[1], metadata))]));
    assert_error(with(&[b"}", &text("neg")[..], b"\x88s"].concat()), &["w: ", "neg"]);
    for nothing in [&b"}"[..], b"N"] {
        assert_eq!(floats(&with(nothing).unwrap()["w"]), [0.0, 1.0]);
    }
}

/// A file may hold other objects next to the weights: dicts and lists of the program's own classes, and long integers.
#[test]
fn other_objects_are_passed_over() {
    let object = |end: &[u8]| [&global("config\nConfig")[..], b")\x81", end].concat();
    let hyper = object(&[b"(", &text("lr")[..], b"K\x01u}b"].concat());
    let queue = object(b"K\x01a(K\x02K\x03e");
    let long = [&b"\x8a\x28"[..], &[1; 40]].concat();
    let beside =
        [("hyper", &hyper[..]), ("queue", &queue), ("long", &long), ("state_dict", &dict(&[("w", &floats_of(2))]))];
    assert_eq!(floats(&read(&dict(&beside)).unwrap()["w"]), [0.0, 1.0]);
    // The weights in a dict of the program's own class.
    let weights = object(&[b"(", &text("w")[..], &floats_of(2), b"u"].concat());
    assert_eq!(floats(&read(&weights).unwrap()["w"]), [0.0, 1.0]);
}

/// The depth of a pickle costs no stack: neither while it is read, nor when it is dropped.
#[test]
fn deep_pickles_are_read_or_refused() {
    let deep = |opcode: &[u8]| [b"N".to_vec(), opcode.repeat(1_000_000)].concat();
    let class = global("m\nC");
    let refused = |value: &[u8], words: &str| assert_error(read(value), &[words]);
    refused(&deep(b"\x85"), "a tuple");
    refused(&[&class[..], &b")R".repeat(1_000_000)].concat(), "an object");
    refused(&[b"]".repeat(1_000_000), b"a".repeat(999_999)].concat(), "a list");
    let deep_beside = dict(&[("best", &deep(b"\x85")), ("w", &floats_of(2))]);
    assert_eq!(floats(&read(&deep_beside).unwrap()["w"]), [0.0, 1.0]);
    // A parameter of a parameter of ...
    let wrap = global("torch._utils\n_rebuild_parameter");
    let (levels, ends) = (wrap.repeat(100_000), b"\x85R".repeat(100_000));
    refused(&dict(&[("w", &[&levels[..], &floats_of(2), &ends].concat())]), "w: ");
    let (levels, ends) = (wrap.repeat(2), b"\x85R".repeat(2));
    let parameter = dict(&[("w", &[&levels[..], &floats_of(2), &ends].concat())]);
    assert_eq!(floats(&read(&parameter).unwrap()["w"]), [0.0, 1.0]);
}

/// Whatever a pickle says, it is read or refused.
#[test]
fn damaged_pickles_never_panic() {
    let other = b"\x88NG12345678K\x01]q\x06(K\x02M\x03\x03eJ\x04\x04\x04\x04h\x06)0";
    let weights = [&b"}q\x05("[..], &text("a"), &floats_of(2), &text("b"), other, b"u"].concat();
    let whole = pickle(&dict(&[("best", &weights), ("state_dict", b"h\x05")]));
    assert_eq!(read_file(&archive(&whole, &storage())).unwrap().len(), 1);
    let check = |bytes: &[u8]| match read_file(&archive(bytes, &storage())) {
        Ok(_) => true,
        Err(Error::File(_)) => false,
        Err(other) => panic!("{other:?}"),
    };
    let opcodes = b"().0123JKMNQRX]abcdehjlqrstu}\x80\x81\x85\x86\x87\x88\x89\x8a\x8b\x00\xff";
    let (mut read, mut refused) = (0, 0);
    for position in 0..whole.len() {
        assert!(!check(&whole[..position]), "{position}");
        for opcode in opcodes {
            let mut bytes = whole.clone();
            bytes[position] = *opcode;
            if check(&bytes) { read += 1 } else { refused += 1 }
        }
    }
    assert!(read > 100 && refused > 1000, "{read} {refused}");
}

#[test]
fn dtypes_without_storages_of_their_own_are_read() {
    let value = dict(&[("u32", &untyped("uint32", 2, &[2])), ("f8", &untyped("float8_e4m3fn", 11, &[1, 3]))]);
    // -0.5, 448 and 1 as float8, with a byte of something else in between.
    let storage = [&[0; 8][..], &7u32.to_le_bytes(), &u32::MAX.to_le_bytes()].concat();
    let tensors = read_file(&archive(&pickle(&value), &storage)).unwrap();
    assert_eq!(tensors["u32"].to_vec1::<u32>().unwrap(), [7, u32::MAX]);
    assert_eq!((tensors["f8"].dtype(), tensors["f8"].dims()), (DType::F8E4M3, &[1, 3][..]));
    let storage = [&[0; 11][..], &[0xb0, 0x7e, 0x38]].concat();
    let f8 = dict(&[("f8", &untyped("float8_e4m3fn", 11, &[1, 3]))]);
    assert_eq!(floats(&read_file(&archive(&pickle(&f8), &storage)).unwrap()["f8"]), [-0.5, 448.0, 1.0]);
}

/// As by `zip`, after the file was extracted.
#[test]
fn a_compressed_archive_is_told_from_a_damaged_one() {
    let mut bytes = archive(&pickle(&dict(&[("w", &floats_of(2))])), &storage());
    // The method, in the headers of the parts and in the directory.
    for (signature, method) in [(b"PK\x03\x04", 8), (b"PK\x01\x02", 10)] {
        for position in 0..bytes.len() - 4 {
            if bytes[position..].starts_with(signature) {
                bytes[position + method] = 8;
            }
        }
    }
    match read_file(&bytes) {
        Err(Error::File(reason)) => {
            assert!(reason.contains("compressed (Deflate") && reason.contains("zip -0"), "{reason}");
            assert!(!reason.contains("complete"), "{reason}");
        }
        other => panic!("{other:?}"),
    }
}

/// `count` tensors that all have the storage, the shape and the strides of one; its pickle is `first`, in which these are
/// kept as 1, 2 and 3.
fn many(count: usize, first: &[u8]) -> Vec<u8> {
    let mut entries = [&b"}("[..], &text("w"), first].concat();
    for number in 0..count {
        entries.extend(text(&number.to_string()));
        entries.extend(global("torch._utils\n_rebuild_tensor_v2"));
        entries.extend(b"(h\x01K\x00h\x02h\x03\x89}tR");
    }
    pickle(&[&entries[..], b"u"].concat())
}

/// A tensor of this shape and these strides, for [`many`].
fn kept(shape: &[i32], strides: &[i32]) -> Vec<u8> {
    let tuple = |values: &[i32]| {
        let values: Vec<u8> = values.iter().flat_map(|value| [b"J", &value.to_le_bytes()[..]].concat()).collect();
        [b"(", &values[..], b"t"].concat()
    };
    [
        global("torch._utils\n_rebuild_tensor_v2"),
        b"((".to_vec(),
        text("storage"),
        global("torch\nFloatStorage"),
        text("0"),
        text("cpu"),
        b"K\x04tQq\x01K\x00".to_vec(),
        tuple(shape),
        b"q\x02".to_vec(),
        tuple(strides),
        b"q\x03\x89}tR".to_vec(),
    ]
    .concat()
}

/// Many tensors of a small file may have the same large shape, or show the same large storage.
#[test]
fn a_small_file_cannot_use_up_the_memory() {
    let zeros = |bytes: usize| vec![0; bytes];
    let refused = |pickle: &[u8], storage: &[u8], words: &str| {
        let text = read_file(&archive(pickle, storage)).err().map(|error| error.to_string());
        assert!(text.as_ref().is_some_and(|text| text.contains(words)), "{text:?}");
    };
    // As long as a shape may be, and longer.
    let shape = |rank: usize| kept(&vec![1; rank], &vec![1; rank]);
    assert_eq!(read_file(&archive(&many(3, &shape(64)), &zeros(16))).unwrap()["2"].rank(), 64);
    refused(&many(1000, &shape(20_000)), &zeros(16), "20000 dimensions, more than 64");
    refused(&many(20_000, &shape(64)), &zeros(16), "16 times");
    // Copies of a matrix, transposed; each has a file's length.
    let transposed = kept(&[200, 200], &[1, 200]);
    assert_eq!(read_file(&archive(&many(3, &transposed), &zeros(160_000))).unwrap().len(), 4);
    refused(&many(30, &transposed), &zeros(160_000), "16 times");
    // A long name of a storage.
    let long = replace(&kept(&[1], &[1]), &text("0"), &text(&"0".repeat(256)));
    refused(&many(10, &long), &zeros(16), "damaged");
}

/// Where views are contiguous, they share the memory of their storage, as in PyTorch.
#[test]
fn views_of_a_storage_share_its_memory() {
    let address = |tensor: &Tensor| {
        let (storage, layout) = tensor.storage_and_layout();
        match &*storage {
            candle_core::Storage::Cpu(storage) => {
                storage.as_slice::<f32>().unwrap()[layout.start_offset()..].as_ptr() as usize
            }
            _ => unreachable!(),
        }
    };
    let view = |offset, count| tensor("FloatStorage", offset, &[count], &[1], b"");
    let tensors = read(&dict(&[("all", &view(0, 4)), ("end", &view(2, 2)), ("one", &view(1, 1))])).unwrap();
    assert_eq!(address(&tensors["end"]), address(&tensors["all"]) + 8);
    assert_eq!(address(&tensors["one"]), address(&tensors["all"]) + 4);
    assert_eq!(floats(&tensors["end"]), [2.0, 3.0]);
    // With one that is not, and where most of the storage would be kept for nothing.
    let transposed = tensor("FloatStorage", 0, &[2, 2], &[1, 2], b"");
    let tensors = read(&dict(&[("all", &view(0, 4)), ("end", &view(2, 2)), ("t", &transposed)])).unwrap();
    assert_eq!(address(&tensors["end"]), address(&tensors["all"]) + 8);
    assert_eq!(floats(&tensors["t"]), [0.0, 2.0, 1.0, 3.0]);
    let tensors = read(&dict(&[("one", &view(1, 1))])).unwrap();
    assert_eq!(tensors["one"].storage_and_layout().1.start_offset(), 0);
    assert_eq!(floats(&tensors["one"]), [1.0]);
}

/// Views that overlap, as in PyTorch's flat parameters.
#[test]
fn reading_views_takes_little_more_memory_than_the_file() {
    const FILE: &str = "CANDLE_DDP_TEST_READ";
    if let Some(file) = std::env::var_os(FILE) {
        let file = File::open(file).unwrap();
        let length = file.metadata().unwrap().len();
        let peak = peak_memory(|| candle_ddp_pickle::read(file, None).unwrap());
        assert!(peak < length + length / 3, "{peak} bytes for a file of {length}");
        return;
    }
    // Large compared with the pages of the program itself, which count as well.
    let whole = 16 << 20;
    let views: Vec<_> = (0..60).map(|first| (first.to_string(), kept(&[whole - first], &[1]))).collect();
    let views: Vec<_> = views.iter().map(|(name, view)| (name.as_str(), &view[..])).collect();
    let mut file = tempfile::NamedTempFile::new().unwrap();
    file.write_all(&archive(&pickle(&dict(&views)), &vec![0; whole as usize * 4])).unwrap();
    let child = test_process(module_path!(), "reading_views_takes_little_more_memory_than_the_file")
        .env(FILE, file.path())
        .output()
        .unwrap();
    assert!(child.status.success(), "{}", String::from_utf8_lossy(&child.stderr));
}
