//! Errors of the images' crate, and of a program's own transforms, as they come out of a data loader's functions.
use candle_core::{Device, Tensor};
use candle_ddp_data::{Collate, Dataset, default_collate};
use candle_ddp_state::seed::Generator;
use candle_ddp_state::{Error, Result};
use candle_ddp_vision::{Cifar10, Image, Mask, Normalize, Split, Transform};
use std::fs;

fn get<D: Dataset>(dataset: &D, index: usize) -> Result<D::Sample> {
    dataset.get(index, &mut Generator::new(0))
}

/// A transform and a label of a program.
struct Even;

impl Even {
    fn check(&self, number: usize) -> Result<()> {
        let reason = format!("{number} is odd");
        if number.is_multiple_of(2) { Ok(()) } else { Err(Error::InvalidArgument { argument: "number", reason }) }
    }
}

impl Transform for Even {
    fn apply(&self, image: &mut Image, _: Option<&mut Mask>, _: &mut Generator) -> candle_core::Result<()> {
        Normalize::default().apply(image)?.sum_all()?;
        Ok(self.check(image.pixels()[0].into())?)
    }
}

#[derive(Debug)]
struct Label(u32);

impl Collate for Label {
    type Batch = Tensor;

    fn collate(labels: Vec<Self>) -> candle_core::Result<Tensor> {
        labels.iter().try_for_each(|label| Even.check(label.0 as usize))?;
        Tensor::from_iter(labels.iter().map(|label| label.0), &Device::Cpu)
    }
}

/// They travel through candle's `Result` and the crate of the images.
#[test]
fn errors_of_a_programs_own_transforms_and_batches_come_out_as_what_they_were() {
    let root = tempfile::tempdir().unwrap();
    // The first byte of a record is its label, and the second the first pixel's red.
    let mut records = [[0u8; 3073]; 2];
    records[1][1] = 7;
    fs::write(root.path().join("test_batch.bin"), records.concat()).unwrap();
    let dataset = Cifar10::new(root.path(), Split::Eval, Even).unwrap();
    assert!(Dataset::len(&dataset) == 2 && get(&dataset, 0).is_ok());
    let failed = get(&dataset, 1).unwrap_err();
    assert!(matches!(&failed, Error::InvalidArgument { argument: "number", .. }), "{failed:?}");
    assert_eq!(failed.to_string(), "number: 7 is odd");
    let failed = Dataset::get(&dataset, 2, &mut Generator::new(0)).unwrap_err();
    assert!(matches!(&failed, Error::InvalidArgument { argument: "index", .. }), "{failed:?}");

    assert_eq!(default_collate(vec![Label(2), Label(4)]).unwrap().to_vec1::<u32>().unwrap(), [2, 4]);
    let image = || Image::new(1, 1, vec![0; 3]).unwrap();
    let through_images = || -> Result<_> { Ok(Normalize::default().collate(vec![(image(), Label(3))])?) };
    for failed in [default_collate(vec![Label(3)]).map(|_| ()), through_images().map(|_| ())] {
        let failed = failed.unwrap_err();
        assert!(matches!(&failed, Error::InvalidArgument { argument: "number", .. }), "{failed:?}");
    }
    // Errors of the crate itself, directly and in candle's.
    let missing = || Image::open(root.path().join("missing.png")).unwrap_err();
    for failed in [Error::from(missing()), candle_core::Error::from(missing()).into()] {
        assert!(matches!(&failed, Error::Io { .. }), "{failed:?}");
    }
}
