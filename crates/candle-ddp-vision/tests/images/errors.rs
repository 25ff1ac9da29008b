//! Damaged files, folders that are something else, and arguments that make no sense.
use crate::values::golden;
use candle_ddp_tensor::seed::Generator;
use candle_ddp_vision::{
    Ade20k, Cifar10, Cifar100, ColorJitter, Error, Image, ImageFolder, Mask, Normalize, RandomCrop,
    RandomHorizontalFlip, RandomResize, RandomResizedCrop, Resize, Result, Split, Transform,
};
use std::collections::BTreeMap;
use std::fmt::Display;
use std::fs;
use std::path::Path;

fn error<T, E: Display>(result: Result<T, E>) -> String {
    result.err().unwrap().to_string()
}

/// A dataset of two classes of two images each.
fn small_folder() -> tempfile::TempDir {
    let root = tempfile::tempdir().unwrap();
    for (number, class) in ["a", "a", "b", "b"].into_iter().enumerate() {
        fs::create_dir_all(root.path().join(class)).unwrap();
        fs::copy(golden().join("folder/Bee/420.jpg"), root.path().join(class).join(format!("{number}.jpg"))).unwrap();
    }
    root
}

/// The generator that a sample is drawn with.
fn generator() -> Generator {
    Generator::new(0)
}

#[test]
fn a_damaged_image_is_an_error_or_is_skipped() {
    let root = small_folder();
    let broken = [root.path().join("a/1.jpg"), root.path().join("b/3.jpg")];
    let whole = fs::read(&broken[0]).unwrap();
    fs::write(&broken[0], &whole[..whole.len() / 2]).unwrap();
    fs::write(&broken[1], b"RIFF\0\0\0\0WEBPVP8 ").unwrap();

    let strict = ImageFolder::new(root.path(), ()).unwrap();
    let text = error(strict.get(1, &mut generator()));
    assert!(text.starts_with(&format!("{}: a damaged JPEG file", broken[0].display())), "{text}");
    let text = error(strict.get(3, &mut generator()));
    assert!(text.contains("b/3.jpg: a WebP file: the file must be JPEG or PNG"), "{text}");
    assert!(strict.skipped().is_empty());

    let patient = ImageFolder::new(root.path(), ()).unwrap().skip_corrupt(true);
    let labels: Vec<u32> = [0, 1, 2, 3, 3, 1].map(|index| patient.get(index, &mut generator()).unwrap().1).to_vec();
    // 1 becomes 2, and 3 becomes 0.
    assert_eq!(labels, [0, 1, 1, 0, 0, 1]);
    assert_eq!(patient.skipped(), broken);

    // A missing file is not damage.
    fs::remove_file(root.path().join("a/0.jpg")).unwrap();
    assert!(matches!(patient.get(0, &mut generator()), Err(Error::Base(candle_ddp_base::Error::Io { .. }))));
    // No image is left.
    fs::write(root.path().join("a/0.jpg"), b"").unwrap();
    fs::write(root.path().join("b/2.jpg"), b"").unwrap();
    let text = error(patient.get(1, &mut generator()));
    assert!(text.contains("a/0.jpg: the file is empty"), "{text}");
    assert_eq!(patient.skipped().len(), 4);
    let text = error(patient.get(1, &mut generator()));
    assert!(text.ends_with("a/1.jpg: all 4 images are damaged, including this one"), "{text}");
    for dataset in [&strict, &patient] {
        assert_eq!(error(dataset.get(4, &mut generator())), "index: 4 must be less than the number of samples, 4");
    }
}

/// Wherever a file ends too early, that is noticed. Other damage may go unnoticed, since JPEG has no checksums, but nothing
/// panics.
#[test]
fn every_truncated_file_is_damaged() {
    let mut generator = Generator::new(1);
    let folder = golden().join("folder");
    for name in ["Bee/420.jpg", "Bee/progressive.jpg", "Bee/restart.jpg", "ant/x/cmyk.jpg", "wasp/palette.png"] {
        let whole = fs::read(folder.join(name)).unwrap();
        assert!(Image::decode(&whole).is_ok());
        // Data after the pixels of a PNG is ignored.
        let lost = if name.ends_with("png") { 13 } else { 1 };
        for len in (0..=whole.len() - lost).rev().take(40).chain((0..40).map(|part| whole.len() * part / 40)) {
            assert!(Image::decode(&whole[..len]).is_err(), "{name}: {len} of {} bytes", whole.len());
        }
        for _ in 0..300 {
            let mut damaged = whole.clone();
            for _ in 0..1 + generator.below(3) {
                let place = generator.below(whole.len() as u64) as usize;
                damaged[place] ^= 1 << generator.below(8);
            }
            let _ = Image::decode(&damaged);
        }
    }
}

#[test]
fn folders_that_are_something_else() {
    let root = small_folder();
    let open = |path: &Path| error(ImageFolder::new(path, ()));
    assert!(open(&root.path().join("missing")).starts_with("reading the folder "));
    assert!(open(&root.path().join("a")).ends_with("it must contain a folder for each class, and contains none"));
    fs::create_dir_all(root.path().join("c/deeper")).unwrap();
    fs::write(root.path().join("c/jpg"), b"").unwrap();
    assert!(open(root.path()).ends_with("each class must have images (.jpg, .jpeg, .png), and these have none: c"));

    assert!(error(Ade20k::new(root.path(), Split::Train, ())).starts_with("reading the folder "));
    fs::create_dir_all(root.path().join("images/training")).unwrap();
    assert!(
        error(Ade20k::new(root.path(), Split::Train, ()))
            .ends_with("the folder must contain images (.jpg), and has none")
    );
    let image = root.path().join("images/training/x.jpg");
    fs::copy(golden().join("folder/Bee/420.jpg"), &image).unwrap();
    let text = error(Ade20k::new(root.path(), Split::Train, ()));
    assert!(
        text.contains("x.jpg: its annotation is missing: ") && text.ends_with("annotations/training/x.png"),
        "{text}"
    );
    let annotation = root.path().join("annotations/training/x.png");
    fs::create_dir_all(annotation.parent().unwrap()).unwrap();
    for (file, reason) in [
        ("mask.png", "must be that of its annotation "),
        ("folder/wasp/rgb.png", "a mask must be a PNG file of 8-bit grey or with a palette, not of Rgb"),
        ("folder/wasp/grey.png", "must be at most 150"),
        ("folder/Bee/420.jpg", "a JPEG file: the file must be PNG"),
    ] {
        fs::copy(golden().join(file), &annotation).unwrap();
        let text = error(Ade20k::new(root.path(), Split::Train, ()).unwrap().get(0, &mut generator()));
        assert!(text.contains(reason), "{file}: {text}");
    }
}

/// Links back to a folder of the class give it any number of paths.
#[test]
fn a_folder_with_links_to_itself_is_read_once() {
    let root = small_folder();
    for (link, target) in
        [("a/x", "."), ("a/y", "."), ("b/a", "../a"), ("b/up", ".."), ("b/none.jpg", "missing"), ("c", "a")]
    {
        std::os::unix::fs::symlink(target, root.path().join(link)).unwrap();
    }
    let folder = ImageFolder::new(root.path(), ()).unwrap();
    let samples: Vec<(&str, u32)> = folder
        .samples()
        .iter()
        .map(|(path, label)| (path.strip_prefix(root.path()).unwrap().to_str().unwrap(), *label))
        .collect();
    // b/a is another class's folder, and b/up/b is b itself.
    let of_a = [("a/0.jpg", 0), ("a/1.jpg", 0)];
    assert_eq!(samples[..2], of_a);
    assert_eq!(samples[samples.len() - 2..], [("c/0.jpg", 2), ("c/1.jpg", 2)]);
    let of_b: Vec<_> = samples.iter().filter(|(_, label)| *label == 1).collect();
    assert_eq!(of_b.len(), 5, "{of_b:?}");
    assert!(of_b.contains(&&("b/2.jpg", 1)) && of_b.contains(&&("b/none.jpg", 1)), "{of_b:?}");
}

/// A FIFO has no end until somebody has written to it, and some devices have none at all.
#[test]
fn only_regular_files_are_read() {
    let root = small_folder();
    let fifo = root.path().join("a/x.png");
    assert!(std::process::Command::new("mkfifo").arg(&fifo).status().unwrap().success());
    std::os::unix::fs::symlink("/dev/zero", root.path().join("a/y.png")).unwrap();
    let strict = ImageFolder::new(root.path(), ()).unwrap();
    assert!(error(strict.get(2, &mut generator())).ends_with("a/x.png: it must be a regular file, and is a FIFO"));
    assert!(error(strict.get(3, &mut generator())).ends_with("a/y.png: it must be a regular file, and is a device"));
    let patient = ImageFolder::new(root.path(), ()).unwrap().skip_corrupt(true);
    assert_eq!(patient.get(2, &mut generator()).unwrap().1, 1);
    assert_eq!(patient.skipped(), [fifo, root.path().join("a/y.png")]);
}

/// Each label stands for one colour of the palette, which the golden data has checked.
#[test]
fn palettes_of_any_depth_are_masks() {
    for (name, count) in [("palette.png", 23), ("palette_transparent.png", 23), ("palette_4.png", 16)] {
        let path = golden().join("folder/wasp").join(name);
        let (image, mask) = (Image::open(&path).unwrap(), Mask::open(&path).unwrap());
        assert_eq!((mask.height(), mask.width()), (21, 27));
        let mut colors = BTreeMap::new();
        for (pixel, label) in image.pixels().chunks(3).zip(mask.labels()) {
            assert_eq!(*colors.entry(label).or_insert(pixel), pixel, "{name}: label {label}");
        }
        assert_eq!(colors.len(), count, "{name}");
    }
    let path = golden().join("folder/wasp/grey.png");
    let grey: Vec<u8> = Image::open(&path).unwrap().pixels().chunks(3).map(|pixel| pixel[0]).collect();
    assert_eq!(Mask::open(&path).unwrap().labels(), grey);
}

/// Differs from plane to plane.
fn byte_at(place: usize) -> u8 {
    (place + place / 251 * 3) as u8
}

/// Bytes that follow from their place, as the files have them: labels, then planes of red, green and blue.
fn records(count: usize, labels: &[usize]) -> Vec<u8> {
    let ramp: Vec<u8> = (0..256 + 3072).map(byte_at).collect();
    let mut bytes = Vec::new();
    for number in 0..count {
        bytes.extend(labels.iter().map(|classes| (number % classes) as u8));
        bytes.extend_from_slice(&ramp[number * 7 % 256..][..3072]);
    }
    bytes
}

#[test]
fn cifar_is_read_from_its_binary_files() {
    let root = tempfile::tempdir().unwrap();
    let inner = root.path().join("cifar-100-binary");
    fs::create_dir(&inner).unwrap();
    fs::write(root.path().join("test_batch.bin"), records(10_000, &[10])).unwrap();
    fs::write(inner.join("test.bin"), records(10_000, &[20, 100])).unwrap();
    let ten = Cifar10::new(root.path(), Split::Eval, ()).unwrap();
    let fine = Cifar100::new(root.path(), Split::Eval, ()).unwrap();
    let coarse = Cifar100::new(&inner, Split::Eval, ()).unwrap().coarse();
    assert_eq!((ten.len(), fine.len(), coarse.len()), (10_000, 10_000, 10_000));
    for index in [0, 1, 57, 9_999] {
        let (image, label) = ten.get(index, &mut generator()).unwrap();
        assert_eq!(label as usize, index % 10);
        let pixel =
            |y: usize, x: usize| [0, 1, 2].map(|channel| byte_at(index * 7 % 256 + channel * 1024 + y * 32 + x));
        let pixels: Vec<u8> = (0..32).flat_map(|y| (0..32).flat_map(move |x| pixel(y, x))).collect();
        assert_eq!((image.height(), image.width(), image.pixels()), (32, 32, &pixels[..]));
        assert_eq!(fine.get(index, &mut generator()).unwrap(), (image.clone(), index as u32 % 100));
        assert_eq!(coarse.get(index, &mut generator()).unwrap(), (image, index as u32 % 20));
    }
    assert_eq!(error(ten.get(10_000, &mut generator())), "index: 10000 must be less than the number of samples, 10000");

    let text = error(Cifar10::new(root.path(), Split::Train, ()));
    assert!(text.starts_with("reading ") && text.contains("data_batch_1.bin"), "{text}");
    let mut damaged = records(10_000, &[10]);
    damaged[3073 * 5] = 10;
    fs::write(root.path().join("test_batch.bin"), &damaged).unwrap();
    let text = error(Cifar10::new(root.path(), Split::Eval, ()));
    assert!(
        text.ends_with("test_batch.bin: the label of record 5, 10, must be less than the number of classes, 10"),
        "{text}"
    );
    fs::write(root.path().join("test_batch.bin"), &damaged[1..]).unwrap();
    let text = error(Cifar10::new(root.path(), Split::Eval, ()));
    assert!(
        text.contains("test_batch.bin: its size, 30729999 bytes, is not a multiple of the record size, 3073"),
        "{text}"
    );
    fs::write(root.path().join("test_batch.bin"), []).unwrap();
    let text = error(Cifar10::new(root.path(), Split::Eval, ()));
    assert!(text.contains("test_batch.bin: its size, 0 bytes"), "{text}");
    fs::write(root.path().join("test_batch.bin"), records(3, &[10])).unwrap();
    assert_eq!(Cifar10::new(root.path(), Split::Eval, ()).unwrap().len(), 3);
}

#[test]
fn arguments_that_make_no_sense() {
    let image = || Image::new(4, 6, vec![7; 72]).unwrap();
    assert_eq!(error(Image::new(2, 2, vec![0; 11])), "pixels: an image of 2×2 pixels must have 12 bytes, not 11");
    assert!(error(Image::new(usize::MAX, 2, vec![])).contains("are too many"));
    assert!(error(Mask::new(0, 2, vec![])).contains("must be at least 1"));
    let try_out = |transform: &dyn Transform| error(transform.apply(&mut image(), None, &mut generator()));
    let size = |height, width| Resize::Exact(height, width);
    assert!(try_out(&size(0, 5)).contains("must be at least 1"));
    assert!(try_out(&size(1 << 30, 1 << 30)).contains("are too many"));
    assert!(try_out(&RandomCrop { size: (4, 7), ..Default::default() }).contains("set pad_if_needed"));
    assert!(try_out(&RandomCrop { size: (0, 0), ..Default::default() }).contains("must be at least 1"));
    assert!(try_out(&RandomCrop { padding: usize::MAX, ..Default::default() }).contains("padding"));
    assert!(try_out(&RandomResize { min_size: 5, max_size: 5 }).starts_with("max_size: "));
    assert!(try_out(&RandomResizedCrop { scale: (0., 1.), ..Default::default() }).starts_with("scale: "));
    assert!(try_out(&RandomResizedCrop { ratio: (2., 1.), ..Default::default() }).starts_with("ratio: "));
    assert!(try_out(&ColorJitter { hue: 0.6, ..Default::default() }).ends_with("0.6 must be from 0 to 0.5"));
    assert!(try_out(&ColorJitter { contrast: f64::NAN, ..Default::default() }).starts_with("contrast: "));
    for p in [-0.1, 1.1, f64::NAN] {
        assert!(try_out(&RandomHorizontalFlip { p }).ends_with("must be from 0 to 1"));
    }
    let flat = Normalize { std: [1., 0., 1.], ..Default::default() };
    for text in [error(flat.apply(&image())), error(flat.batch([&image()]))] {
        assert!(text.starts_with("std: [1.0, 0.0, 1.0] must not"), "{text}");
    }
    let other = Image::new(6, 4, vec![7; 72]).unwrap();
    assert!(
        error(Normalize::default().batch([&image(), &other]))
            .starts_with("images: all must have the same size: number 1 of the batch has 6×4")
    );
    assert!(error(Normalize::default().collate::<u32>(vec![])).starts_with("images: a batch must have at least one"));

    // An error of a transform names the file.
    let root = small_folder();
    let folder = ImageFolder::new(root.path(), RandomCrop::default()).unwrap();
    let text = error(folder.get(0, &mut generator()));
    assert!(text.contains("a/0.jpg: size: 224×224 pixels"), "{text}");
}
