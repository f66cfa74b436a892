import java.io.BufferedReader;
import java.io.InputStreamReader;
import java.nio.file.FileAlreadyExistsException;
import java.nio.file.Files;
import java.nio.file.Path;
import org.apache.curator.framework.CuratorFramework;
import org.apache.curator.framework.CuratorFrameworkFactory;
import org.apache.curator.framework.recipes.locks.InterProcessMutex;
import org.apache.curator.retry.RetryForever;

/** Curator's mutex as a contender: `hold` until a line comes in, or `loop` through a section that nobody else may be in. */
class Contender {
    public static void main(String[] args) throws Exception {
        CuratorFramework client =
                CuratorFrameworkFactory.newClient(args[1], 4000, 4000, new RetryForever(50));
        client.start();
        InterProcessMutex mutex = new InterProcessMutex(client, args[2]);
        if (args[0].equals("hold")) {
            System.out.println("ready");
            mutex.acquire();
            System.out.println("held");
            new BufferedReader(new InputStreamReader(System.in)).readLine();
            mutex.release();
            System.out.println("released");
        } else {
            Path section = Path.of(args[3]);
            System.out.println("ready");
            for (int turn = 0; turn < Integer.parseInt(args[4]); turn++) {
                mutex.acquire();
                try {
                    Files.createFile(section);
                    Thread.sleep(2);
                    Files.delete(section);
                } catch (FileAlreadyExistsException together) {
                    System.out.println("together");
                } finally {
                    mutex.release();
                }
            }
            System.out.println("done");
        }
        client.close();
    }
}
