//! Images and transforms against Pillow and torchvision: `tests/golden/vision`, by `scripts/golden_vision.py`.
use candle_core::safetensors::load;
use candle_core::{Device, Tensor};
use candle_ddp_tensor::seed::Generator;
use candle_ddp_vision::{
    Ade20k, CenterCrop, ColorJitter, IGNORE_INDEX, Image, ImageFolder, Mask, Normalize, RandomCrop,
    RandomHorizontalFlip, RandomResize, RandomResizedCrop, Resize, Split, Transform,
};
use std::collections::HashMap;
use std::path::{Path, PathBuf};

pub(crate) fn golden() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/golden/vision")
}

fn expected() -> HashMap<String, Tensor> {
    load(golden().join("vision.safetensors"), &Device::Cpu).unwrap()
}

fn bytes(tensor: &Tensor) -> Vec<u8> {
    tensor.flatten_all().unwrap().to_vec1().unwrap()
}

/// The number of differing bytes by the size of the difference.
fn differences(actual: &[u8], expected: &[u8]) -> [usize; 256] {
    assert_eq!(actual.len(), expected.len());
    let mut counts = [0; 256];
    actual.iter().zip(expected).for_each(|(a, b)| counts[usize::from(a.abs_diff(*b))] += 1);
    counts
}

#[test]
fn the_folder_is_torchvisions_and_its_images_are_pillows() {
    let text = std::fs::read_to_string(golden().join("folder.json")).unwrap();
    let listing: serde_json::Value = serde_json::from_str(&text).unwrap();
    let root = golden().join("folder");
    let folder = ImageFolder::new(&root, ()).unwrap();
    assert_eq!(serde_json::to_value(folder.class_to_idx()).unwrap(), listing["class_to_idx"]);
    let samples = folder.samples().iter().map(|(path, label)| (path.strip_prefix(&root).unwrap(), label));
    assert_eq!(serde_json::to_value(samples.collect::<Vec<_>>()).unwrap(), listing["samples"]);

    let expected = expected();
    for index in 0..folder.len() {
        let path = folder.samples()[index].0.strip_prefix(&root).unwrap().to_str().unwrap();
        let (image, label) = folder.get(index, &mut Generator::new(0)).unwrap();
        assert_eq!(label, folder.samples()[index].1);
        let tensor = &expected[&format!("decode|{path}")];
        assert_eq!(tensor.dims(), [image.height(), image.width(), 3], "{path}");
        let differences = differences(image.pixels(), &bytes(tensor));
        let total: usize = differences.iter().sum();
        let largest = differences.iter().rposition(|&count| count > 0).unwrap();
        if std::fs::read(root.join(path)).unwrap().starts_with(b"\x89PNG") {
            assert_eq!(largest, 0, "{path}");
        } else {
            assert!(largest <= 4, "{path}: a difference of {largest}");
            let above_2: usize = differences[3..].iter().sum();
            assert!(above_2 * 100 <= total, "{path}: {above_2} of {total} differ by more than 2");
        }
    }
}

/// A transform by its name in the golden data, and by how much its images may differ.
fn transform(name: &str) -> (Box<dyn Transform>, u8) {
    let fill = RandomCrop { fill: [9, 8, 7], mask_fill: 77, ..Default::default() };
    let part = RandomResizedCrop::default();
    let exact = |height, width| Resize::Exact(height, width);
    match name {
        "resize_exact" => (Box::new(exact(21, 30)), 1),
        "resize_larger" => (Box::new(exact(37, 45)), 1),
        "resize_one_side" => (Box::new(exact(28, 20)), 1),
        "resize_shorter" => (Box::new(Resize::ShorterSide(25)), 1),
        "random_resize" => (Box::new(RandomResize { min_size: 12, max_size: 40 }), 1),
        "random_resized_crop" => (Box::new(RandomResizedCrop { size: (20, 16), ..part }), 1),
        "random_resized_crop_middle" => {
            (Box::new(RandomResizedCrop { size: (16, 16), scale: (1., 1.), ratio: (3., 4.) }), 1)
        }
        "random_resized_crop_tall" => {
            (Box::new(RandomResizedCrop { size: (16, 16), scale: (1., 1.), ratio: (0.2, 0.3) }), 1)
        }
        "center_crop" => (Box::new(CenterCrop { size: (17, 22), ..Default::default() }), 0),
        "center_crop_padded" => (Box::new(CenterCrop { size: (31, 21), mask_fill: 0 }), 0),
        "random_crop" => (Box::new(RandomCrop { size: (20, 24), ..fill }), 0),
        "random_crop_padded" => (Box::new(RandomCrop { size: (28, 34), padding: 4, ..fill }), 0),
        "random_crop_needed" => (Box::new(RandomCrop { size: (32, 20), pad_if_needed: true, ..fill }), 0),
        "flip" => (Box::new(RandomHorizontalFlip::default()), 0),
        "pipeline" => {
            let crop = RandomCrop { size: (24, 24), pad_if_needed: true, ..fill };
            (Box::new((RandomResize { min_size: 16, max_size: 40 }, crop, RandomHorizontalFlip { p: 0.5 })), 1)
        }
        "brightness" => (Box::new(ColorJitter { brightness: 0.6, ..Default::default() }), 0),
        "contrast" => (Box::new(ColorJitter { contrast: 0.6, ..Default::default() }), 0),
        "saturation" => (Box::new(ColorJitter { saturation: 1.5, ..Default::default() }), 0),
        "hue" => (Box::new(ColorJitter { hue: 0.5, ..Default::default() }), 0),
        "color_jitter" => (Box::new(ColorJitter { brightness: 0.4, contrast: 0.4, saturation: 0.4, hue: 0.1 }), 0),
        _ => panic!("{name}"),
    }
}

#[test]
fn transforms_are_torchvisions() {
    let open = |name: &str| Image::open(golden().join(name)).unwrap();
    let (picture, colors, mask) =
        (open("image.png"), open("colors.png"), Mask::open(golden().join("mask.png")).unwrap());
    let expected = expected();
    let mut cases = 0;
    for key in expected.keys().filter(|key| key.ends_with("|image")) {
        let [name, seed, _] = key.split('|').collect::<Vec<_>>()[..] else { panic!("{key}") };
        let mask_key = format!("{name}|{seed}|mask");
        let (transform, tolerance) = transform(name);
        let (mut image, mut mask) = match expected.contains_key(&mask_key) {
            true => (picture.clone(), Some(mask.clone())),
            false => (colors.clone(), None),
        };
        transform.apply(&mut image, mask.as_mut(), &mut Generator::new(seed.parse().unwrap())).unwrap();
        assert_eq!(expected[key].dims(), [image.height(), image.width(), 3], "{key}");
        let differences = differences(image.pixels(), &bytes(&expected[key]));
        let largest = differences.iter().rposition(|&count| count > 0).unwrap();
        assert!(largest <= tolerance.into(), "{key}: {:?}", &differences[..=largest]);
        if let Some(mask) = mask {
            assert_eq!((mask.height(), mask.width()), (image.height(), image.width()), "{mask_key}");
            assert_eq!(mask.labels(), bytes(&expected[&mask_key]), "{mask_key}");
        }
        cases += 1;
    }
    assert_eq!(cases, 48);
}

#[test]
fn normalized_values_are_torchvisions() {
    let pixels = (0..=255u8).flat_map(|step| [step, 255 - step, (step % 16) * 16 + step / 16]).collect();
    let image = Image::new(16, 16, pixels).unwrap();
    let expected = expected();
    for (name, normalize) in [("to_tensor", Normalize::default()), ("normalize", Normalize::IMAGENET)] {
        let actual = normalize.apply(&image).unwrap();
        assert_eq!(actual.dims(), expected[name].dims());
        assert_eq!(
            actual.flatten_all().unwrap().to_vec1::<f32>().unwrap(),
            expected[name].flatten_all().unwrap().to_vec1::<f32>().unwrap(),
            "{name}"
        );
        let batch = normalize.batch([&image, &image]).unwrap();
        assert_eq!(batch.dims(), [2, 3, 16, 16]);
        for number in 0..2 {
            let difference = (batch.get(number).unwrap() - &actual).unwrap().abs().unwrap().sum_all().unwrap();
            assert_eq!(difference.to_scalar::<f32>().unwrap(), 0.);
        }
    }
}

#[test]
fn ade20k_has_the_masks_of_its_annotations() {
    let expected = expected();
    for (root, split, name, count) in
        [(golden(), Split::Train, "training", 2), (golden().join("ADEChallengeData2016"), Split::Eval, "validation", 1)]
    {
        let dataset = Ade20k::new(root, split, ()).unwrap();
        assert_eq!(dataset.len(), count);
        let mut samples = Vec::new();
        for index in 0..count {
            let (image, mask) = dataset.get(index, &mut Generator::new(0)).unwrap();
            assert_eq!((mask.height(), mask.width()), (image.height(), image.width()));
            let labels = bytes(&expected[&format!("ade20k|{name}|{}", index + 1)]);
            let labels: Vec<u8> = labels.iter().map(|&l| if l == 0 { IGNORE_INDEX as u8 } else { l - 1 }).collect();
            assert!(labels.contains(&255) && labels.contains(&149));
            assert_eq!(mask.labels(), labels);
            samples.push((image, mask));
        }
        let (images, masks) = Normalize::IMAGENET.collate(samples[..1].to_vec()).unwrap();
        assert_eq!((images.dims(), masks.dims()), (&[1, 3, 21, 27][..], &[1, 21, 27][..]));
    }
}
