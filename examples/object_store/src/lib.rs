//! A folder of an object store as a source of tar shards.
use candle_ddp::data::{FileVersion, ReadRange};
use object_store::aws::AmazonS3Builder;
use object_store::azure::MicrosoftAzureBuilder;
use object_store::gcp::GoogleCloudStorageBuilder;
use object_store::http::HttpBuilder;
use object_store::path::Path;
use object_store::{ClientOptions, ObjectStore, ObjectStoreExt, ObjectStoreScheme, RetryConfig};
use std::io::{Error, ErrorKind, Result};
use std::ops::Range;
use tokio::runtime::Runtime;
use url::{Position, Url};

/// A folder of an object store.
#[derive(Debug)]
pub struct Bucket {
    store: Box<dyn ObjectStore>,
    /// Tells this folder from all others.
    url: String,
    folder: Path,
    runtime: Runtime,
}

impl Bucket {
    /// The folder `url`: `s3://BUCKET/FOLDER`, `gs://…`, `az://…` or `https://…`. Keys, regions and time-outs come from the
    /// environment: AWS_*, GOOGLE_*, AZURE_*. A request may take 30 s unless they say otherwise.
    pub fn open(url: &str) -> Result<Self> {
        let url = Url::parse(url).map_err(Error::other)?;
        let (scheme, folder) = ObjectStoreScheme::parse(&url).map_err(Error::other)?;
        // RangeCache tries again, after any failure.
        let retry = RetryConfig { max_retries: 0, ..Default::default() };
        let name = url.to_string();
        Self::new(
            match scheme {
                ObjectStoreScheme::AmazonS3 => {
                    Box::new(AmazonS3Builder::from_env().with_url(url).with_retry(retry).build()?)
                }
                ObjectStoreScheme::GoogleCloudStorage => {
                    Box::new(GoogleCloudStorageBuilder::from_env().with_url(url).with_retry(retry).build()?)
                }
                ObjectStoreScheme::MicrosoftAzure => {
                    Box::new(MicrosoftAzureBuilder::from_env().with_url(url).with_retry(retry).build()?)
                }
                ObjectStoreScheme::Http => {
                    let options = ClientOptions::new().with_allow_http(url.scheme() == "http");
                    let host = HttpBuilder::new().with_url(&url[..Position::BeforePath]);
                    Box::new(host.with_client_options(options).with_retry(retry).build()?)
                }
                _ => return Err(Error::new(ErrorKind::Unsupported, format!("{url} is in no object store"))),
            },
            name,
            folder,
        )
    }

    /// The folder `folder` of any store. What is kept on disks is found again by `url`, so no other folder may have the same one.
    pub fn new(store: Box<dyn ObjectStore>, url: String, folder: Path) -> Result<Self> {
        Ok(Self { store, url, folder, runtime: Runtime::new()? })
    }

    fn path(&self, file: &str) -> Path {
        self.folder.parts().chain(Path::from(file).parts()).collect()
    }
}

impl ReadRange for Bucket {
    fn location(&self, file: &str) -> String {
        format!("{}/{file}", self.url.trim_end_matches('/'))
    }

    fn version(&self, file: &str) -> Result<FileVersion> {
        let found = self.runtime.block_on(self.store.head(&self.path(file))).map_err(kind)?;
        let tag = match found.e_tag {
            Some(tag) => tag,
            // The time 0 stands for an answer that has none.
            None if found.last_modified.timestamp() > 0 => found.last_modified.to_string(),
            None => {
                return Err(Error::new(ErrorKind::Unsupported, format!("{file} has neither ETag nor Last-Modified")));
            }
        };
        Ok(FileVersion { len: found.size, tag })
    }

    fn read_range(&self, file: &str, range: Range<u64>) -> Result<Vec<u8>> {
        let read = self.runtime.block_on(self.store.get_range(&self.path(file), range));
        Ok(read.map_err(kind)?.to_vec())
    }
}

/// RangeCache does not try again where that is hopeless.
fn kind(error: object_store::Error) -> Error {
    use object_store::Error::{NotFound, PermissionDenied, Unauthenticated};
    match error {
        NotFound { .. } => Error::new(ErrorKind::NotFound, error),
        PermissionDenied { .. } | Unauthenticated { .. } => Error::new(ErrorKind::PermissionDenied, error),
        // Whatever may pass, such as a time-out.
        error => Error::other(error),
    }
}
